"""Checkpointing: what is computed twice, when, and that nothing but activations changes by it."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe, current_microbatch, is_checkpointing, is_recomputing
from gpipe_cli.pipeline.gpipe import plain_pipe


class Spy(nn.Module):
    """Writes down each time it runs: its name, the micro-batch and the flags."""

    def __init__(self, name: str, log: list[tuple[object, ...]]) -> None:
        super().__init__()
        self.name = name
        self.log = log

    def forward(self, input: Tensor) -> Tensor:
        self.log.append((self.name, current_microbatch().index, is_checkpointing(), is_recomputing()))
        return input * 1


@pytest.mark.parametrize(
    ("checkpoint", "rows", "checkpointed"),
    [
        ("always", 4, 4),
        ("except_last", 4, 3),
        ("never", 4, 0),
        # torchgpipe compared with chunks - 1 and checkpointed both of two micro-batches here.
        ("except_last", 2, 1),
    ],
)
def test_each_mode_recomputes_what_it_says(checkpoint: str, rows: int, checkpointed: int) -> None:
    log: list[tuple[object, ...]] = []
    with GPipe(
        nn.Sequential(Spy("a", log), nn.Linear(1, 1)), [1, 1], chunks=4, checkpoint=checkpoint
    ) as pipe:
        output = pipe(torch.ones(rows, 1, requires_grad=True))
        forward = [("a", index, index < checkpointed, False) for index in range(rows)]
        assert log == forward
        output.sum().backward()
        assert log == forward + [("a", index, False, True) for index in range(checkpointed)]


@pytest.mark.parametrize("switch_off", ["eval", "no_grad"])
def test_nothing_is_recomputed_in_eval_mode_or_without_grad(switch_off: str) -> None:
    log: list[tuple[object, ...]] = []
    with GPipe(nn.Sequential(Spy("a", log), nn.Linear(1, 1)), [1, 1], chunks=2, checkpoint="always") as pipe:
        pipe.train(switch_off != "eval")
        with torch.set_grad_enabled(switch_off != "no_grad"):
            pipe(torch.ones(4, 1))
    assert log == [("a", 0, False, False), ("a", 1, False, False)]


def test_outside_a_pipe_the_flags_are_down() -> None:
    assert (current_microbatch(), is_checkpointing(), is_recomputing()) == (None, False, False)


def test_recomputation_does_not_wait_for_the_gradient() -> None:
    """It is what makes checkpointing cheap in a pipeline: recompute while the partition behind is still
    busy.
    """
    recomputed = threading.Event()

    class Watched(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            if is_recomputing():
                recomputed.set()
            return input * 1

    class WaitInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, input: Tensor) -> Tensor:
            return input.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            assert recomputed.wait(60), "the partition before this one waited for the gradient"
            return gradient

    class Last(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return WaitInBackward.apply(input)

    with GPipe(nn.Sequential(Watched(), Last()), [1, 1], checkpoint="always") as pipe:
        pipe(torch.ones(2, 2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_first_layer_may_work_in_place(checkpoint: str) -> None:
    """torchvision's ReLU does. torchgpipe raised here, and recomputed from the overwritten input before
    that.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ELU(inplace=True))
    twin = copy.deepcopy(model)
    input, target = torch.randn(6, 3), torch.randn(6, 3)
    with GPipe(model, [1, 1, 1, 1], chunks=3, checkpoint=checkpoint) as pipe:
        for key in range(3):
            pipe.step(input, target, functional.mse_loss, key=key)
    plain = plain_pipe(twin, chunks=3)
    for key in range(3):
        plain.step(input, target, functional.mse_loss, key=key)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


class AddInPlace(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.add_(1) * input


def test_writing_in_place_twice_as_much_the_second_time_does_not_happen() -> None:
    """torchgpipe recorded 3 instead of 2 for this as an expected failure."""
    results = []
    for checkpoint in ("always", "never"):
        with GPipe(nn.Sequential(nn.Linear(1, 1), AddInPlace()), [1, 1], checkpoint=checkpoint) as pipe:
            nn.init.ones_(pipe[0].weight)
            nn.init.zeros_(pipe[0].bias)
            for _ in range(2):
                pipe.zero_grad()
                output = pipe(torch.ones(1, 1))
                output.sum().backward()
            results.append((output.item(), pipe[0].weight.grad.item()))
    assert results == [(4.0, 4.0), (4.0, 4.0)]


def test_a_layer_that_begins_to_write_its_input_later_is_recomputed_from_the_input_as_it_was() -> None:
    class Sometimes(nn.Module):
        writes = False

        def forward(self, input: Tensor) -> Tensor:
            return (input.add_(1) if self.writes else input + 1) ** 2

    with GPipe(nn.Sequential(nn.Linear(1, 1), Sometimes()), [1, 1], checkpoint="always") as pipe:
        gradients = []
        for pipe[1].writes in (False, True):
            pipe.zero_grad()
            pipe(torch.ones(1, 1)).sum().backward()
            gradients.append(pipe[0].weight.grad.clone())
    assert torch.equal(*gradients)


class Counter(nn.Module):
    """Keeps state as users do: a buffer that decides the output, and one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * input.detach().mean(0)
        return input * self.calls + self.mean


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize(
    "stateful",
    [
        lambda: nn.BatchNorm1d(2),
        lambda: nn.BatchNorm1d(2, momentum=None),
        Counter,
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    ],
    ids=["batch norm", "cumulative batch norm", "own buffers", "spectral norm"],
)
def test_no_buffer_changes_in_recomputation_and_gradients_are_those_of_the_forward(
    checkpoint: str, stateful: type[nn.Module]
) -> None:
    """In torchgpipe batch norm counted 4 updates for 2 micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), stateful(), nn.Linear(2, 2)).double()
    plain = plain_pipe(copy.deepcopy(model), chunks=2)
    input, target = torch.randn(6, 2).double(), torch.randn(6, 2).double()
    with GPipe(model, [1, 2], chunks=2, checkpoint=checkpoint) as pipe:
        for key in range(3):
            for each in (pipe, plain):
                each.step(input, target, functional.mse_loss, key=key)
    for (name, mine), theirs in zip(pipe.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    for (name, mine), theirs in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_zeros_of_a_dropped_out_output_are_zeros_of_the_gradient() -> None:
    """torchgpipe's bug of parallel randoms: the second mask must be the first."""
    dropouts = nn.Sequential(*(nn.Dropout(0.2) for _ in range(3)))
    input = torch.rand(10, 10, requires_grad=True)
    with GPipe(dropouts, [1, 1, 1], chunks=10, checkpoint="always") as pipe:
        output = pipe(input)
        output.norm().backward()
    assert output.detach().eq(0).tolist() == input.grad.eq(0).tolist()


def test_the_default_generator_is_where_it_would_be_without_checkpointing() -> None:
    states = []
    for checkpoint in ("always", "never"):
        torch.manual_seed(0)
        with GPipe(
            nn.Sequential(nn.Dropout(), nn.Dropout()), [1, 1], chunks=2, checkpoint=checkpoint
        ) as pipe:
            pipe(torch.ones(4, 4, requires_grad=True)).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("call", ["step", "forward"])
def test_recomputation_happens_under_the_forwards_autocast(call: str) -> None:
    """fairscale#1199. torchgpipe's workers computed in float32 under the caller's autocast."""
    forwards: list[tuple[torch.dtype, bool]] = []

    class Note(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            output = functional.linear(input, torch.eye(2))
            forwards.append((output.dtype, is_recomputing()))
            return output.float()

    with GPipe(nn.Sequential(nn.Linear(2, 2), Note()), [1, 1], chunks=2, checkpoint="always") as pipe:
        if call == "step":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pipe.step(torch.ones(4, 2), torch.ones(4, 2), functional.mse_loss)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = pipe(torch.ones(4, 2))
            output.sum().backward()
    assert forwards == [(torch.bfloat16, recomputing) for recomputing in (False, False, True, True)]
    assert pipe[0].weight.grad is not None


def test_under_autocast_the_bits_are_those_of_the_plain_sequence() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    plain = plain_pipe(copy.deepcopy(model), chunks=3)
    input, target = torch.randn(9, 8), torch.randn(9, 2)
    with GPipe(model, [2, 3], chunks=3, checkpoint="always") as pipe, torch.autocast("cpu", torch.bfloat16):
        losses = [each.step(input, target, functional.mse_loss, key=0) for each in (pipe, plain)]
    assert torch.equal(*losses)
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
        assert mine.grad.any()


def test_layers_that_write_their_input_give_the_same_bits_wherever_a_micro_batch_begins() -> None:
    """A micro-batch of rows of 20 bytes begins anywhere, but its copy for recompute began at a multiple of 64 bytes. On
    CPUs without AVX-512 the products of torch's BLAS then differed in their last bits."""

    class Scale(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input.mul_(1.5)

    torch.manual_seed(0)
    model = nn.Sequential(Scale(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    input, target = torch.randn(7, 5), torch.randn(7, 3)
    plain = plain_pipe(copy.deepcopy(model), chunks=3)
    with GPipe(model, [4], chunks=3, checkpoint="always") as pipe:
        for key in range(2):  # a pipe observes its layers in the first step
            for each in (plain, pipe):
                each.step(input.clone(), target, functional.mse_loss, key=key)
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
