"""Tied parameters behave like any parameter."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from gpipe_cli import GPipe
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.pipeline.partitioning import move_to_devices

CHUNKS = 2
CALLS = ["step", "backward"]
INPUT = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
TARGET = torch.linspace(1, 2, 24, dtype=torch.float64).reshape(6, 4)

pytestmark = pytest.mark.timeout(60)


def tied_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    return model


def make_pipe(kind: str, model: nn.Sequential) -> Any:
    if kind == "plain_pipe":
        return plain_pipe(model, chunks=CHUNKS)
    pipe = GPipe(model, [1, 2], chunks=CHUNKS, checkpoint=kind)
    pipe.step_timeout = 20
    return pipe


def run(pipe: nn.Module, call: str) -> None:
    if call == "step":
        pipe.step(INPUT, TARGET, functional.mse_loss, key=0)
    else:
        functional.mse_loss(pipe(INPUT), TARGET).backward()


def run_plain(model: nn.Sequential) -> None:
    for input, target in zip(INPUT.tensor_split(CHUNKS), TARGET.tensor_split(CHUNKS), strict=True):
        (functional.mse_loss(model(input), target) * (len(input) / len(INPUT))).backward()


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    for name, mine, theirs in zip(names, model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)


every_pipe = pytest.mark.parametrize("kind", ["plain_pipe", "always", "never"])
every_call = pytest.mark.parametrize("call", CALLS)


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def assign_state(model: nn.Sequential, *, tied: bool) -> None:
    state = {name: tensor * 0.5 for name, tensor in copy.deepcopy(model.state_dict()).items()}
    if tied:
        state = {name: nn.Parameter(tensor) for name, tensor in state.items()}
        state["2.weight"] = state["0.weight"]
    model.load_state_dict(state, assign=True)


def new_weight(model: nn.Sequential, *, tied: bool) -> None:
    torch.manual_seed(1)
    model[2].weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    if tied:
        model[0].weight = model[2].weight


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "state that is assigned and tied": partial(assign_state, tied=True),
    "state that is assigned and not tied": partial(assign_state, tied=False),
    "a new weight for both": partial(new_weight, tied=True),
    "a new weight for one": partial(new_weight, tied=False),
    "a parametrization": lambda model: parametrize.register_parametrization(model[0], "weight", Half()),
    "a gradient": lambda model: setattr(model[0].weight, "grad", torch.full((4, 4), 0.25).double()),
    "a hook": lambda model: model[0].weight.register_hook(lambda gradient: gradient * 2),
}


@every_pipe
@every_call
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_between_two_calls_counts_and_stays(kind: str, call: str, change: str) -> None:
    """The next step put old tensors back, replaced a gradient that was there, or never called a hook."""
    model, plain = tied_model(), tied_model()
    with make_pipe(kind, model) as pipe:
        run(pipe, call)
        pipe.zero_grad()
        for each in (model, plain):
            CHANGES[change](each)
        held = {name: (leaf, leaf.grad) for name, leaf in model.named_parameters(remove_duplicate=False)}
        for _ in range(2):
            run(pipe, call)
            run_plain(plain)
            assert_same_gradients(model, plain)
        for name, (leaf, gradient) in held.items():
            assert model.get_parameter(name) is leaf
            assert gradient is None or leaf.grad is gradient


@every_pipe
@every_call
@pytest.mark.parametrize("name", ["0.bias", "2.bias", "0.weight"])
def test_a_hook_that_is_not_linear_sees_what_it_sees_without_a_pipe(kind: str, call: str, name: str) -> None:
    """The gradient of a micro-batch in a step, the whole one in a backward."""
    model, plain = tied_model(), tied_model()
    calls: list[nn.Sequential] = []
    for each in (model, plain):
        each.get_parameter(name).register_hook(
            lambda gradient, each=each: calls.append(each) or gradient.clamp(-0.01, 0.01) * 2
        )
    with make_pipe(kind, model) as pipe:
        run(pipe, call)
    if call == "backward":  # one graph for all micro-batches, as the caller sees it
        functional.mse_loss(
            torch.cat([plain(piece) for piece in INPUT.tensor_split(CHUNKS)]), TARGET
        ).backward()
    else:
        run_plain(plain)
    assert calls.count(model) == calls.count(plain) == (CHUNKS if call == "step" else 1)
    assert_same_gradients(model, plain)


@every_pipe
@every_call
def test_a_hook_after_accumulation_sees_the_gradient_of_a_tied_parameter(kind: str, call: str) -> None:
    model, plain = tied_model(), tied_model()
    last: dict[nn.Sequential, Tensor] = {}
    for each in (model, plain):
        each[0].weight.register_post_accumulate_grad_hook(
            lambda parameter, each=each: last.update({each: parameter.grad.clone()})
        )
    with make_pipe(kind, model) as pipe:
        run(pipe, call)
    run_plain(plain)
    torch.testing.assert_close(last[model], last[plain], rtol=1e-12, atol=1e-14)
    assert torch.equal(last[model], model[0].weight.grad)


@every_call
def test_the_bits_of_a_tied_gradient_do_not_depend_on_the_split(call: str) -> None:
    torch.manual_seed(0)
    results = []
    for balance in ([5], [1, 4], [2, 3], [1, 1, 1, 1, 1]):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
        layers[2].weight = layers[4].weight = layers[0].weight
        model = nn.Sequential(*layers).double()
        with GPipe(model, balance, chunks=3) as pipe:
            run(pipe, call)
            results.append(pipe.module[0].weight.grad)
    assert all(torch.equal(results[0], result) for result in results)


class Twice(nn.Module):
    """Holds a module that another layer holds too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, input: Tensor) -> Tensor:
        time.sleep(0.002)  # lets the other partition begin meanwhile, if it may
        output: Tensor = self.shared(input)
        return output


@every_call
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_module_that_two_partitions_use_keeps_its_parameters_and_gets_all_gradients(
    call: str, checkpoint: str
) -> None:
    """Each worker put its own parameters into the module: one ran with those of the other, or left them there."""

    def trained(balance: list[int]) -> nn.Linear:
        torch.manual_seed(0)
        shared = nn.Linear(4, 4).double()
        weight = shared.weight
        model = nn.Sequential(Twice(shared), nn.Tanh(), Twice(shared))
        with GPipe(model, balance, chunks=6, checkpoint=checkpoint) as pipe:
            pipe.step_timeout = 20
            for _ in range(2):
                run(pipe, call)
        assert shared.weight is weight
        return shared

    shared, plain = trained([1, 2]), trained([3])
    assert torch.equal(shared.weight.grad, plain.weight.grad)
    assert torch.equal(shared.bias.grad, plain.bias.grad)


def test_what_partitions_share_moves_to_the_device_of_the_first_and_stays_shared() -> None:
    """The meta device stands for an accelerator: like some of them, it gives every module a parameter of its own."""
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), Twice(shared), nn.Linear(4, 4), Twice(shared)).double()
    model[2].weight = model[0].weight
    model[2].register_buffer("mean", shared.running_mean)
    partitions = nn.ModuleList([model[:2], model[2:]])
    move_to_devices(partitions, [torch.device("meta"), torch.device("cpu")])
    assert model[2].weight is model[0].weight
    assert model[2].mean is shared.running_mean
    moved = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    assert moved == set(model.state_dict()) - {"2.bias"}
