from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import ConfigError
from gpipe_cli.training.lr_schedules import Constant, Cosine, Linear, LrSchedule, OneCycle, Step

totals = st.integers(2, 300)
warmups = st.one_of(st.floats(0, 0.99), st.integers(1, 50))
schedules: st.SearchStrategy[LrSchedule] = st.one_of(
    st.builds(Constant, warmup=warmups),
    st.builds(Cosine, warmup=warmups, final=st.floats(0, 1)),
    st.builds(Linear, warmup=warmups, final=st.floats(0, 1)),
    st.builds(Step, milestones=st.lists(st.floats(0, 1), max_size=4), drop=st.floats(0, 1), warmup=warmups),
    st.builds(OneCycle, rise=st.floats(0, 1), start=st.floats(0, 1), final=st.floats(0, 1)),
)


def factors(schedule: LrSchedule, total: int) -> list[float]:
    return [schedule.factor(step, total) for step in range(total)]


@given(schedules, totals)
def test_no_rate_is_negative_or_above_the_optimizers(schedule: LrSchedule, total: int) -> None:
    assert all(0 <= factor <= 1 + 1e-12 for factor in factors(schedule, total))


@given(schedules)
def test_a_run_of_one_step_has_a_rate(schedule: LrSchedule) -> None:
    assert 0 <= schedule.factor(0, 1) <= 1


@given(st.integers(1, 50), st.integers(60, 300))
def test_warm_up_rises_step_by_step_to_the_full_rate(warmup: int, total: int) -> None:
    rising = factors(Constant(warmup=warmup), total)
    assert all(before < after for before, after in pairwise(rising[: warmup + 1]))
    assert rising[0] > 0 and set(rising[warmup:]) == {1.0}


@given(st.integers(10, 300))
def test_warm_up_may_be_a_fraction_of_the_run(total: int) -> None:
    assert factors(Constant(warmup=0.2), total) == pytest.approx(
        [min(1.0, (step + 1) / (0.2 * total + 1)) for step in range(total)]
    )


@given(totals, st.floats(0, 1))
def test_cosine_ends_where_it_is_told_to(total: int, final: float) -> None:
    curve = factors(Cosine(final=final), total)
    assert curve[0] == 1 and curve[-1] == pytest.approx(final)


def test_linear_falls_by_equal_steps_after_its_warm_up() -> None:
    assert factors(Linear(warmup=3, final=0.5), 8) == pytest.approx(
        [0.25, 0.5, 0.75, 1, 0.875, 0.75, 0.625, 0.5]
    )
    assert factors(Linear(), 5) == pytest.approx([1, 0.75, 0.5, 0.25, 0])


@given(st.integers(10, 300))
def test_one_cycle_starts_peaks_and_ends_where_it_is_told_to(total: int) -> None:
    curve = factors(OneCycle(rise=0.3, start=0.04, final=0.0001), total)
    assert curve[0] == pytest.approx(0.04) and curve[-1] == pytest.approx(0.0001)
    peak = curve.index(max(curve))
    assert curve[: peak + 1] == sorted(curve[: peak + 1])
    assert curve[peak:] == sorted(curve[peak:], reverse=True)


def of_torch(
    make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler], total: int
) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is trained here, and torch says so
        for _ in range(total):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step() if len(rates) < total else None
    return rates


@pytest.mark.parametrize("total", [10, 37, 115])
def test_one_cycle_is_that_of_torch(total: int) -> None:
    expected = of_torch(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1.0, total_steps=total, pct_start=0.3, div_factor=25, final_div_factor=400
        ),
        total,
    )
    assert factors(OneCycle(rise=0.3, start=1 / 25, final=1 / 10_000), total) == pytest.approx(expected)


@pytest.mark.parametrize("total", [2, 10, 115])
def test_cosine_is_that_of_torch(total: int) -> None:
    expected = of_torch(
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - 1), total
    )
    assert factors(Cosine(), total) == pytest.approx(expected, abs=1e-12)


def test_step_drops_at_its_milestones() -> None:
    assert factors(Step(milestones=[0.5, 0.8], drop=0.1), 10) == pytest.approx(
        [1] * 5 + [0.1] * 3 + [0.01] * 2
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Constant(warmup=-1), "lr_schedule.warmup=-1: must be at least 0"),
        (lambda: Cosine(final=-0.5), "lr_schedule.final=-0.5: must be at least 0"),
        (lambda: Step(milestones=[0.5, 2]), r"lr_schedule.milestones\[1\]=2: must be from 0 to 1"),
        (lambda: Step(milestones=["x"]), "expected a list of numbers"),  # type: ignore[list-item]
        (lambda: Step(milestones=[], drop=-1), "lr_schedule.drop=-1"),
        (lambda: OneCycle(rise=1.5), "lr_schedule.rise=1.5: must be from 0 to 1"),
        (lambda: OneCycle(start=-1), "lr_schedule.start=-1"),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name(make: Callable[[], LrSchedule], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
