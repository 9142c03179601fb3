"""`output = pipe(input)` and then any backward that autograd offers."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.pipeline.gpipe import plain_pipe

MODES = ["always", "except_last", "never"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)
    ).double()


def gradients(module: nn.Module) -> list[Tensor | None]:
    values = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return values


def assert_close(left: list[Tensor | None], right: list[Tensor | None]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@pytest.fixture(params=MODES)
def pipe(request: pytest.FixtureRequest):
    with GPipe(model(), [1, 2, 2], chunks=3, checkpoint=request.param) as pipe:
        yield pipe


@pytest.mark.parametrize("needs_grad", [True, False])
def test_loss_backward_fills_parameters_and_input(pipe: GPipe, needs_grad: bool) -> None:
    plain = model()
    input = torch.randn(7, 3).double().requires_grad_(needs_grad)
    twin = input.detach().clone().requires_grad_(needs_grad)
    pipe(input).square().sum().backward()
    plain(twin).square().sum().backward()
    assert_close([*gradients(pipe), input.grad], [*gradients(plain), twin.grad])


def test_backward_runs_in_the_workers_on_cpu(pipe: GPipe) -> None:
    names: dict[int, list[str]] = {0: [], 2: [], 4: []}

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, input: Tensor, layer: int) -> Tensor:
            ctx.layer = layer
            return input.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
            names[ctx.layer].append(threading.current_thread().name)
            return gradient, None

    for layer in names:
        pipe[layer].register_forward_hook(lambda _, args, output, layer=layer: Node.apply(output, layer))
    pipe(torch.ones(3, 3).double()).sum().backward()
    assert names == {layer: [f"gpipe-worker-{layer // 2}"] * 3 for layer in names}


def test_a_parameters_hook_sees_the_whole_gradient_once_in_the_calling_thread(pipe: GPipe) -> None:
    """As in plain PyTorch: a hook that clips or scales would do so to each micro-batch's share."""
    input, plain = torch.randn(7, 3).double(), model()
    calls: list[tuple[Tensor, threading.Thread]] = []
    for each in (pipe, plain):
        each[2].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        each[2].weight.register_post_accumulate_grad_hook(
            lambda weight: calls.append((weight.grad.clone(), threading.current_thread()))
        )
        each(input).square().sum().backward()
    assert len(calls) == 2 and {thread for _, thread in calls} == {threading.main_thread()}
    assert_close(gradients(pipe), gradients(plain))
    torch.testing.assert_close(calls[0][0], calls[1][0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("checkpoint", MODES)
def test_in_a_step_a_parameters_hook_sees_each_micro_batchs_gradient_in_the_worker(checkpoint: str) -> None:
    names: list[str] = []
    with GPipe(model(), [1, 2, 2], chunks=3, checkpoint=checkpoint) as pipe:
        pipe[2].weight.register_hook(lambda gradient: names.append(threading.current_thread().name))
        pipe.step(torch.ones(7, 3).double(), torch.zeros(7, 2).double(), functional.mse_loss)
    assert names == ["gpipe-worker-1"] * 3


def test_two_backward_passes_with_retain_graph_double_the_gradients(pipe: GPipe) -> None:
    output = pipe(torch.randn(7, 3).double())
    output.sum().backward(retain_graph=True)
    once = gradients(pipe)
    output.sum().backward(retain_graph=True)
    assert_close(gradients(pipe), once)
    output.sum().backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the pipe a second time"):
        output.sum().backward()


def test_the_graph_dies_after_backward_and_with_a_dropped_output(pipe: GPipe) -> None:
    references: list[weakref.ref[object]] = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, input: Tensor) -> Tensor:
            ctx.token = token = type("Token", (), {})()
            references.append(weakref.ref(token))
            return input.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient

    handle = pipe[2].register_forward_hook(lambda layer, args, output: Node.apply(output))
    output = pipe(torch.randn(7, 3).double())
    output.sum().backward()
    pipe(torch.randn(7, 3).double())
    del output
    handle.remove()
    pipe(torch.randn(7, 3).double())  # the workers have let go of their last jobs now
    gc.collect()
    assert references
    assert all(reference() is None for reference in references)


def test_create_graph_is_refused_clearly(pipe: GPipe) -> None:
    with pytest.raises(RuntimeError, match="create_graph=True does not work through a pipe"):
        pipe(torch.randn(7, 3).double()).sum().backward(create_graph=True)


def test_autograd_grad_and_backward_of_some_inputs_are_refused_and_leave_gradients_alone(pipe: GPipe) -> None:
    """torchgpipe filled `.grad` of the parameters here, under checkpointing."""
    input = torch.randn(7, 3).double().requires_grad_()
    for wanted in (input, pipe[0].weight):
        with pytest.raises(
            RuntimeError, match=r"do not work through a pipe.*Call backward\(\) without inputs="
        ):
            torch.autograd.grad(pipe(input).square().sum(), wanted, allow_unused=True)
        with pytest.raises(RuntimeError, match=r"do not work through a pipe"):
            pipe(input).square().sum().backward(inputs=[wanted])
    assert gradients(pipe) == [None] * 6


def test_a_hook_registered_between_forward_and_backward_is_refused(pipe: GPipe) -> None:
    output = pipe(torch.randn(7, 3).double())
    pipe[0].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(
        RuntimeError, match="hook was registered on a parameter of a pipe between forward and"
    ):
        output.sum().backward()


def test_only_a_part_of_the_output_may_be_used(pipe: GPipe) -> None:
    input = torch.randn(7, 3).double()
    pipe(input)[5:].sum().backward()
    plain = model()
    plain(input)[5:].sum().backward()
    assert_close(gradients(pipe), gradients(plain))


def test_two_mini_batches_may_be_in_the_air_at_once(pipe: GPipe) -> None:
    inputs = [torch.randn(rows, 3).double() for rows in (7, 4)]
    outputs = [pipe(input) for input in inputs]
    for output in outputs:
        output.sum().backward()
    plain = model()
    for input in inputs:
        plain(input).sum().backward()
    assert_close(gradients(pipe), gradients(plain))


def test_the_output_of_a_fully_frozen_model_requires_no_grad(pipe: GPipe) -> None:
    """In torchgpipe it did, under checkpointing."""
    pipe.requires_grad_(False)
    assert not pipe(torch.ones(7, 3).double()).requires_grad
    assert pipe(torch.ones(7, 3).double().requires_grad_()).requires_grad


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_member_of_the_output_without_gradient_stays_without(checkpoint: str) -> None:
    """torchgpipe: 'element 1 of tensors does not require grad' under checkpointing."""

    class Split(nn.Module):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return input * 2, input.detach(), input.argmax(1)

    with GPipe(nn.Sequential(nn.Linear(3, 3), Split()), [1, 1], chunks=2, checkpoint=checkpoint) as pipe:
        value, constant, places = pipe(torch.randn(4, 3))
        assert [item.requires_grad for item in (value, constant, places)] == [True, False, False]
        value.sum().backward()
        assert pipe[0].weight.grad is not None


def test_an_identity_that_autograd_sees_as_such_passes(pipe: GPipe) -> None:
    """torchgpipe's bug 2: an autograd function that returns its input unchanged."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, input: Tensor) -> Tensor:
            return input

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient

    class Layer(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return Identity.apply(input)

    with GPipe(nn.Sequential(Layer(), nn.Linear(2, 2), Layer()), [1, 1, 1], chunks=2) as identity:
        input = torch.ones(4, 2, requires_grad=True)
        identity(input).sum().backward()
        assert input.grad is not None


@pytest.mark.parametrize("checkpoint", MODES)
def test_the_input_of_a_step_gets_its_gradient_too(checkpoint: str) -> None:
    inputs = [torch.linspace(0, 1, 21).reshape(7, 3).double().requires_grad_() for _ in range(2)]
    with GPipe(model(), [2, 3], chunks=3, checkpoint=checkpoint, schedule="1f1b") as pipe:
        for each, input in zip((pipe, plain_pipe(model(), chunks=3)), inputs, strict=True):
            each.step(input, torch.zeros(7, 2).double(), functional.mse_loss)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_the_backward_that_cuda_needs_gives_the_same_bits() -> None:
    """On CUDA the caller's thread runs the backward itself; here that way is forced on the CPU."""
    results = []
    for in_caller in (False, True):
        with GPipe(model(), [1, 2, 2], chunks=3) as pipe:
            pipe._runner._backward_in_caller = in_caller
            pipe(torch.ones(7, 3).double()).square().sum().backward()
            results.append(gradients(pipe))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
