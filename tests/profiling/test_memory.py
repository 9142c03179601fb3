"""What is counted on paper beside what a real pipe and real optimizers keep alive."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from functools import partial
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.profiling.memory import activation_bytes, state_bytes, update_bytes
from gpipe_cli.profiling.model_stats import model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.spec import PipelineSpec

BALANCE = [3, 2, 3]
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": partial(torch.optim.RMSprop, centered=True),
    "adafactor": torch.optim.Adafactor,
}


@final
class Held:
    """Stands in for a saved tensor, and is gone when the graph is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@final
class Meter:
    """The bytes that a partition holds at once; a storage counts as long as anything refers to it."""

    def __init__(self, parameters: set[int]) -> None:
        self._parameters, self._lock = parameters, threading.Lock()
        self._holders: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}
        self.peak = 0
        self._hooks: list[saved_tensors_hooks] = []

    def enter(self, *_: Any) -> None:
        self._hooks.append(saved_tensors_hooks(self._pack, lambda held: held.tensor))
        self._hooks[-1].__enter__()

    def leave(self, *_: Any) -> None:
        self._hooks.pop().__exit__(None, None, None)

    def _pack(self, tensor: Tensor) -> Held:
        # Not its storage: the micro-batches of the first partition are views of the caller's one mini-batch.
        held, place = Held(tensor), tensor.data_ptr()
        if place not in self._parameters:
            with self._lock:
                self._holders[place] += 1
                self._bytes[place] = tensor.nbytes
                self.peak = max(self.peak, sum(self._bytes.values()))
            weakref.finalize(held, self._release, place)
        return held

    def _release(self, place: int) -> None:
        with self._lock:
            self._holders[place] -= 1
            if self._holders[place] == 0:
                del self._bytes[place]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("chunks", "frozen"), [(1, 0), (2, 0), (4, 0), (4, 3), (4, 5)])
def test_the_activations_counted_are_those_a_pipe_keeps(schedule: str, chunks: int, frozen: int) -> None:
    layers = [(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*(module for pair in layers for module in pair))
    model[:frozen].requires_grad_(False)
    input, target = torch.randn(8, 8), torch.randn(8, 8)
    sample = Sample(input[: 8 // chunks], target[: 8 // chunks], functional.mse_loss)
    spec = PipelineSpec(schedule, 3, chunks, "never")
    counted = activation_bytes(model_stats(model, sample, count_flops=False), BALANCE, spec)
    meters = _watched(model)

    with GPipe(
        model, BALANCE, devices=["cpu"] * 3, chunks=chunks, checkpoint="never", schedule=schedule
    ) as pipe:
        pipe.step(input, target, functional.mse_loss)

    # The loss is no layer, so the meter does not see what it keeps: the difference of output and target.
    loss = sample.target.nbytes if sample.target is not None else 0
    kept_losses = spec.peaks[-1].bytes(loss, 0)
    assert [meter.peak for meter in meters[:-1]] == counted[:-1]
    assert counted[-1] - kept_losses <= meters[-1].peak <= counted[-1]


def _watched(model: nn.Sequential) -> list[Meter]:
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    meters = [Meter(parameters) for _ in BALANCE]
    by_layer = [meter for meter, layers in zip(meters, BALANCE, strict=True) for _ in range(layers)]
    for meter, layer in zip(by_layer, model, strict=True):
        layer.register_forward_pre_hook(partial(Meter.enter, meter))
        layer.register_forward_hook(partial(Meter.leave, meter))
    return meters


def enumerate_names(parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(str(index), parameter) for index, parameter in enumerate(parameters)]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_state_counted_is_what_the_optimizer_really_keeps(make: Any) -> None:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((), (4,), (2, 2), (6, 4, 3, 3), (1, 5))]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = [
        sum(value.nbytes for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
        for parameter in parameters
    ]
    assert state_bytes(make, enumerate_names(parameters)) == expected


def test_a_frozen_parameter_needs_nothing_and_a_huge_one_no_memory() -> None:
    parameters = [nn.Parameter(torch.empty(2**20, 2**20, device="meta")), nn.Parameter(torch.ones(3), False)]
    assert state_bytes(torch.optim.AdamW, enumerate_names(parameters)) == [2 * 4 * 2**40 + 4, 0]


@pytest.mark.parametrize(
    ("name", "settings", "copies"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, 2),
        ("AdamW", {"foreach": False}, 4),
        ("AdamW", {"foreach": True}, 3),
        ("AdamW", {"fused": True}, 2),
        ("Adam", {"foreach": True, "amsgrad": True}, 4),
    ],
    ids=str,
)
def test_an_update_takes_its_temporaries_and_the_state_that_it_creates(
    name: str, settings: dict[str, Any], copies: int
) -> None:
    large, small = (nn.Parameter(torch.zeros(size)) for size in (1000, 10))
    frozen = nn.Parameter(torch.zeros(1000), requires_grad=False)
    sizes = update_bytes(
        lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1, **settings),
        [large, frozen, small],
        torch.device("cpu"),
    )
    assert sizes == [pytest.approx(copies * 4000, rel=0.01), 0, pytest.approx(copies * 40, rel=0.01, abs=1)]
