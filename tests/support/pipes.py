"""Runs a pipe and plain autograd on the same micro-batches, and compares every loss, gradient and buffer to the bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe_cli import GPipe
from gpipe_cli.skip import pop, skippable, stash
from gpipe_cli.torch_internals.tensors import copy_memory

CHECKPOINTS = ["always", "except_last", "never"]
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
WIDTH = 6
STEP_TIMEOUT = 60
"""Seconds after which a step of a test counts as hanging."""


class Do(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, input: Tensor) -> Iterator[Any]:
        yield stash("skip", input)
        return input


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, input: Tensor) -> Iterator[Any]:
        skip = yield pop("skip")
        return input if skip is None else input * skip


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Hands(nn.Module):
    """Hands a buffer that it changes to the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(WIDTH))

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return input, self.count


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, input: Tensor) -> Tensor:
        return torch_checkpoint(self.second, self.first(input), use_reentrant=True)


def balances(layers: int) -> list[list[int]]:
    """One partition, two in every way, and one for each layer."""
    in_two = [[first, layers - first] for first in range(1, layers)]
    return [[layers], *in_two, *([[1] * layers] if layers > 2 else [])]


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def plain_steps(
    model: nn.Module, loss: Callable[..., Tensor], steps: int, chunks: int, *, weighted: bool = True
) -> list[Tensor]:
    """The loss of each step by plain autograd, micro-batch by micro-batch; gradients add up."""
    input, target = batch()
    losses = []
    for step in range(steps):
        enter_step(model, step)
        total = []
        for part, wanted in zip(input.tensor_split(chunks), target.tensor_split(chunks), strict=True):
            share = len(part) / len(input) if weighted else 1
            each = loss(model(*copy_memory([part])), wanted) * share
            each.backward()
            total.append(each.detach())
        losses.append(torch.stack(total).sum())
    return losses


def pipe_steps(pipe: Any, loss: Callable[..., Tensor], steps: int, **options: Any) -> list[Tensor]:
    input, target = batch()
    losses = []
    for step in range(steps):
        enter_step(pipe, step)
        losses.append(pipe.step(input.clone(), target, loss, key=step, **options))
    return losses


def enter_step(model: nn.Module, step: int) -> None:
    """Tell layers that begin something later, by their attribute `at_step`, which step it is."""
    for module in model.modules():
        if hasattr(module, "at_step"):
            module.at_step = step


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def compare(
    layers: Sequence[nn.Module],
    *cuts: list[int],
    steps: int = 3,
    chunks: int = 4,
    schedules: Sequence[str] = ("gpipe",),
    **options: Any,
) -> None:
    """For each of the balances, under the schedules in turn, a pipe and plain autograd give the same in every step:
    losses, gradients and buffers.
    """
    fresh = nn.Sequential(*layers)
    plain = copy.deepcopy(fresh)
    expected = plain_steps(plain, functional.mse_loss, steps, chunks)
    for balance, schedule in zip(cuts, itertools.cycle(schedules), strict=False):
        model = copy.deepcopy(fresh)
        devices = ["cpu"] * min(2, len(balance)) if schedule == "interleaved" else None
        with GPipe(
            model,
            balance,
            chunks=chunks,
            devices=devices,
            schedule=schedule,
            step_timeout=STEP_TIMEOUT,
            **options,
        ) as pipe:
            given = pipe_steps(pipe, functional.mse_loss, steps)
        assert all(map(torch.equal, given, expected)), (balance, schedule, options)
        assert_same(model, plain)
