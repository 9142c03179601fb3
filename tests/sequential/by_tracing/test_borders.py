"""Where a model may be cut: never before a write to memory that crosses, never between two uses of buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.sequential import to_sequential


class Three(nn.Module):
    """Three modules, and between them what `between` does."""

    def __init__(
        self, between: Callable[[Tensor, Tensor], Tensor], middle: type[nn.Module] = nn.Tanh
    ) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), middle(), nn.Linear(4, 4)
        self.between = between

    def forward(self, input: Tensor) -> Any:
        value = self.one(input)
        return self.three(self.between(value, self.two(value)))


@pytest.mark.parametrize(
    ("between", "layers"),
    [
        (lambda value, other: value + other, ("one", "two", "three")),
        (lambda value, other: value.add_(other.exp()), ("one..two", "three")),
        (lambda value, other: value[:, 1:].mul_(2).sum() + other, ("one..two", "three")),
        (lambda value, other: other.mul_(2).relu() + value, ("one", "two", "three")),
    ],
)
def test_memory_that_crosses_is_not_written_after_the_cut(
    between: Callable[[Tensor, Tensor], Tensor], layers: tuple[str, ...]
) -> None:
    model = Three(between)
    model.two.register_parameter("scale", nn.Parameter(torch.ones(4)))
    sequence = to_sequential(model, torch.randn(2, 4))
    assert sequence.layer_names == layers


class Twice(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.first, self.second = shared, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Any:
        return self.shared(self.second(self.shared(self.first(input))))


def test_a_module_with_buffers_that_is_called_twice_stays_in_one_layer() -> None:
    sequence = to_sequential(Twice(nn.BatchNorm1d(4)), torch.randn(2, 4))
    assert sequence.layer_names == ("first", "shared")
    assert len(to_sequential(Twice(nn.Linear(4, 4)), torch.randn(2, 4))) == 4


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_a_module_called_twice_sums_its_gradients_once_per_micro_batch(
    checkpoint: str, schedule: str
) -> None:
    original, input = Twice(nn.Linear(4, 4)).double(), torch.randn(7, 4).double()
    sequence = to_sequential(copy.deepcopy(original), input)
    original(input).square().mean().backward()
    with GPipe(
        sequence, [2, 2], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint, schedule=schedule
    ) as pipe:
        pipe.step(input, input, lambda output, target: output.square().mean())
    for there, here in zip(original.parameters(), sequence.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=0, atol=1e-12)


class Program(nn.Module):
    """A forward made of any steps: modules, sums, sizes, and writes to what earlier steps made."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.modules_of_steps = nn.ModuleList(nn.Linear(3, 3) for _ in steps)

    def forward(self, input: Tensor) -> Tensor:
        values = [input * 2]
        for (kind, first, second), module in zip(self.steps, self.modules_of_steps, strict=True):
            one, other = values[first % len(values)], values[second % len(values)]
            if kind == "write":
                one.add_(other)
            elif kind == "write a part":
                one[:, :1].mul_(0.5)
            else:
                values.append(module(one) if kind == "module" else (one + other).view(other.shape[0], -1))
        return torch.stack(values[-3:]).sum(0)


STEPS = st.tuples(
    st.sampled_from(["module", "module", "sum", "write", "write a part"]),
    st.integers(0, 9),
    st.integers(0, 9),
)


@settings(max_examples=20)
@given(st.lists(STEPS, min_size=2, max_size=10))
def test_any_forward_has_the_originals_bits_in_a_pipe_with_recomputation(
    steps: list[tuple[str, int, int]],
) -> None:
    original, input = Program([("module", 0, 0), *steps, ("module", 9, 9)]), torch.randn(2, 3)
    sequence = to_sequential(copy.deepcopy(original), input)
    try:
        expected = original(input)
        expected.square().sum().backward()
    except RuntimeError:  # what was written was still needed: no gradient without a pipe either
        assume(False)
    with GPipe(sequence, [1] * len(sequence), devices=["cpu"] * len(sequence), checkpoint="always") as pipe:
        output = pipe(input)
        assert isinstance(output, Tensor) and torch.equal(output, expected)
        output.square().sum().backward()
    for there, here in zip(original.parameters(), sequence.parameters(), strict=True):
        assert (there.grad is None) == (here.grad is None)
        assert there.grad is None or here.grad is None or torch.equal(there.grad, here.grad)
