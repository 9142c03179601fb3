"""Chosen cuts are legal, cheap and enough; no cut separates memory from its writer or buffers from a second use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential import to_sequential
from gpipe_cli.sequential.tracing.cuts import CutPoint, choose_cuts


def point(
    position: int, uses: int, *, tensors: int = 1, bytes: int = 8, obstacle: str | None = None
) -> CutPoint:
    return CutPoint((position,), obstacle, tensors, bytes, uses)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[CutPoint], int]:
    is_use = draw(st.lists(st.booleans(), min_size=1, max_size=120))
    points = [
        point(
            position,
            sum(is_use[:position]),
            tensors=draw(st.integers(1, 3)),
            bytes=draw(st.integers(1, 50)),
            obstacle=draw(st.sampled_from([None, None, None, "an obstacle"])),
        )
        for position in range(1, len(is_use))
    ]
    return points, sum(is_use)


@given(models())
def test_every_layer_uses_something_and_no_cut_has_an_obstacle(model: tuple[list[CutPoint], int]) -> None:
    points, uses = model
    try:
        cuts = choose_cuts(points, uses)
    except ConfigError:
        assert all(point.obstacle for point in points if 0 < point.uses < uses)
        return
    assert cuts == sorted(cuts, key=lambda cut: cut.positions)
    counts = [0, *(cut.uses for cut in cuts), uses]
    assert all(before < after for before, after in pairwise(counts)) or not cuts
    assert all(cut.obstacle is None for cut in cuts)


def test_between_two_modules_the_cheapest_point_is_cut_and_of_equals_the_last() -> None:
    points = [point(1, 1), point(2, 1, bytes=4), point(3, 1, bytes=4), point(4, 2)]
    assert [cut.positions for cut in choose_cuts(points, 3)] == [(3,), (4,)]


def test_a_segment_that_more_tensors_cross_is_cut_again_only_if_it_is_long() -> None:
    blocks = [point(position, position, tensors=1 if position % 10 == 0 else 2) for position in range(1, 200)]
    assert [cut.uses for cut in choose_cuts(blocks, 200)] == list(range(10, 200, 10))
    barely = [point(position, position, tensors=2 if 1 < position < 24 else 1) for position in range(1, 100)]
    assert [cut.uses for cut in choose_cuts(barely, 100)][:2] == [1, 24]
    growing = [
        point(position, position, tensors=1 + min(position, 100 - position) // 10)
        for position in range(1, 100)
    ]
    cuts = [cut.uses for cut in choose_cuts(growing, 100)]
    assert max(after - before for before, after in pairwise([0, *cuts, 100])) <= 24


def test_a_small_model_in_which_several_tensors_always_cross_is_cut_too() -> None:
    assert len(choose_cuts([point(1, 1, tensors=2), point(2, 2, tensors=2)], 3)) == 2


def test_a_model_without_a_legal_cut_is_refused_with_the_obstacles() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be cut anywhere: a dict crosses \('x'\); pass only tensors"
    ):
        choose_cuts([point(1, 1, obstacle="a dict crosses ('x')")], 2)


class Three(nn.Module):
    """Calls `between` on the outputs of the first two of its three modules."""

    def __init__(
        self, between: Callable[[Tensor, Tensor], Tensor], middle: type[nn.Module] = nn.Tanh
    ) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), middle(), nn.Linear(4, 4)
        self.between = between

    def forward(self, input: Tensor) -> Any:
        value = self.first(input)
        return self.third(self.between(value, self.second(value)))


@pytest.mark.parametrize(
    ("between", "layers"),
    [
        (lambda value, other: value + other, ("first", "second", "third")),
        (lambda value, other: value.add_(other.exp()), ("first..second", "third")),
        (lambda value, other: value[:, 1:].mul_(2).sum() + other, ("first..second", "third")),
        (lambda value, other: other.mul_(2).relu() + value, ("first", "second", "third")),
    ],
)
def test_no_cut_separates_memory_from_a_later_write(
    between: Callable[[Tensor, Tensor], Tensor], layers: tuple[str, ...]
) -> None:
    model = Three(between)
    model.second.register_parameter("scale", nn.Parameter(torch.ones(4)))
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
    for expected_parameter, parameter in zip(original.parameters(), sequence.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected_parameter.grad, rtol=0, atol=1e-12)


class Program(nn.Module):
    """A forward of arbitrary steps: modules, sums, sizes, and in-place writes to earlier values."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.modules_of_steps = nn.ModuleList(nn.Linear(3, 3) for _ in steps)

    def forward(self, input: Tensor) -> Tensor:
        values = [input * 2]
        for (kind, first, second), module in zip(self.steps, self.modules_of_steps, strict=True):
            left, right = values[first % len(values)], values[second % len(values)]
            if kind == "write":
                left.add_(right)
            elif kind == "write a part":
                left[:, :1].mul_(0.5)
            else:
                values.append(module(left) if kind == "module" else (left + right).view(right.shape[0], -1))
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
    except RuntimeError:  # backward needs an overwritten value: no gradient without a pipe either
        assume(False)
    with GPipe(sequence, [1] * len(sequence), devices=["cpu"] * len(sequence), checkpoint="always") as pipe:
        output = pipe(input)
        assert isinstance(output, Tensor) and torch.equal(output, expected)
        output.square().sum().backward()
    for expected_parameter, parameter in zip(original.parameters(), sequence.parameters(), strict=True):
        expected_grad, grad = expected_parameter.grad, parameter.grad
        assert (expected_grad is None) == (grad is None)
        assert expected_grad is None or grad is None or torch.equal(expected_grad, grad)
