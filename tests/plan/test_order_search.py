"""Searched orders, V-Half and V-Min: legal, within memory, as good as published, never worse than a schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.zero_bubble import ROWS, ZB_2P, ZB_2P_THROUGHPUTS, Row, v_problem, v_published
from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.order_problem import OrderProblem
from gpipe_cli.plan.order_search import memory_curve, search_orders, v_orders, v_shaped
from gpipe_cli.schedule import Kind, order
from gpipe_cli.schedule.order_check import check_order
from gpipe_cli.schedule.simulate import PartitionCost

FIRST_ROWS = [row for row in ROWS if row.chunks == 3 * row.devices]
SLOW_IF_LARGE = [row if row.devices == 8 else pytest.param(row, marks=pytest.mark.slow) for row in FIRST_ROWS]
EQUAL_TIMES = PartitionCost(1, 2, input_grad=1, weight_grad=1)
SPLIT_IS_SLOW = PartitionCost(2.0, 3.0, input_grad=2.0, weight_grad=2.0)


@st.composite
def problems(draw: st.DrawFn) -> OrderProblem:
    devices, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    turns = draw(st.integers(1, 3))
    workers = tuple(range(devices)) * turns
    if turns == 2 and devices > 1 and draw(st.booleans()):
        workers = v_shaped(devices)
    times = st.integers(1, 20).map(float)

    def cost() -> PartitionCost:
        forward, input_grad, weight_grad = draw(times), draw(times), draw(times)
        backward = (input_grad + weight_grad) * draw(st.sampled_from((0.6, 0.9, 1.0)))
        saved = draw(st.integers(1, 5))
        return PartitionCost(
            *(forward, backward, draw(times), draw(times) / 4, saved, 1),
            input_grad=input_grad,
            weight_grad=weight_grad,
        )

    costs = tuple(cost() for _ in workers)
    stops = tuple(draw(st.sampled_from([0, chunks])) for _ in workers)
    memory = tuple(float(draw(st.integers(21, 60))) for _ in range(devices))
    cores = draw(st.sampled_from((None, 1, 2)))
    return OrderProblem(costs, workers, chunks, memory, stops, synchronized=draw(st.booleans()), cores=cores)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_an_order_is_legal_fits_the_memory_and_is_between_bound_and_existing_schedules(
    problem: OrderProblem,
) -> None:
    result = search_orders(problem, effort=2_000)
    check_order(result.order, problem.partitions, problem.chunks)
    assert problem.fits(result.order)
    assert problem.step_of(result.order) == pytest.approx(result.step)
    assert result.bound <= result.step * (1 + 1e-9)
    if problem.partitions == problem.devices:
        for name in ("gpipe", "1f1b", "zero_bubble"):
            existing = order(name, problem.partitions, problem.chunks, problem.devices)
            if problem.fits(existing):
                assert result.step <= problem.step_of(existing) * (1 + 1e-9)


def test_the_search_repeats_itself() -> None:
    problem = FIRST_ROWS[0].problem(memory=2.0)
    assert search_orders(problem, 50_000) == search_orders(problem, 50_000)


@pytest.mark.parametrize("row", SLOW_IF_LARGE, ids=lambda row: row.model)
def test_with_the_memory_of_zb_2p_the_bubble_is_at_most_that_of_zb_2p(row: Row) -> None:
    result = search_orders(row.problem(memory=2.0), effort=max(60_000, 90 * row.devices * row.chunks))
    assert round(result.bubble, 4) <= ZB_2P[row.model]
    assert row.searched_throughput(2.0) == pytest.approx(ZB_2P_THROUGHPUTS[row.model], rel=0.06)


@pytest.mark.parametrize("row", FIRST_ROWS, ids=lambda row: row.model)
def test_with_the_memory_of_1f1b_the_bubble_is_at_most_that_of_zb_1p(row: Row) -> None:
    result = search_orders(row.problem(memory=1.0), effort=20_000)
    assert round(result.bubble, 4) <= row.bubbles[2]


@pytest.mark.parametrize("name", ["v_half", "v_min"])
@pytest.mark.parametrize("row", SLOW_IF_LARGE, ids=lambda row: row.model)
def test_with_half_and_a_third_of_the_memory_the_bubble_is_at_most_that_of_v_half_and_v_min(
    row: Row, name: str
) -> None:
    kept, bubble = v_published(row.devices, row.chunks)[name]
    equal = v_problem([EQUAL_TIMES] * (2 * row.devices), row.devices, row.chunks, kept)
    assert search_orders(equal, effort=60_000).bubble <= bubble
    assert search_orders(row.v_problem(kept), effort=60_000).bubble <= row.v_block_bubble(name)


def test_workers_that_wait_for_each_other_reach_the_lower_bound_with_twice_the_memory() -> None:
    for row in FIRST_ROWS[:2]:
        problem = replace(row.problem(memory=2.0), synchronized=True, kept_share=1.0)
        result = search_orders(problem)
        assert result.gap == pytest.approx(0, abs=1e-6)
        assert result.origin == "searched"


def test_more_memory_never_gives_a_larger_bubble() -> None:
    curve = memory_curve(FIRST_ROWS[0].problem(memory=1.0), (0.01, 0.5, 1.0, 1.5, 2.0), effort=20_000)
    assert [share for share, _ in curve] == [0.5, 1.0, 1.5, 2.0]
    bubbles = [bubble for _, bubble in curve]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[-1] < bubbles[0] / 3


def test_without_room_for_one_micro_batch_the_search_says_so() -> None:
    problem = FIRST_ROWS[0].problem(memory=0.01)
    with pytest.raises(ConfigError, match=r"no order fits the memory .* device_memory more"):
        search_orders(problem, effort=1_000)


def test_only_the_last_backwards_are_split_if_halves_cost_more_than_the_whole() -> None:
    first = replace(SPLIT_IS_SLOW, input_grad=0.0, weight_grad=3.0)
    problem = OrderProblem((first, SPLIT_IS_SLOW), (0, 1), chunks=8)
    result = search_orders(problem, effort=5_000)
    split = [each.micro_batch for actions in result.order for each in actions if each.kind is Kind.INPUT_GRAD]
    assert 0 < len(split) < 8 and min(split) > 3
    assert all(result.step < problem.step_of(order(name, 2, 8, 2)) for name in ("1f1b", "zero_bubble"))


def test_a_simpler_order_is_kept_if_a_searched_one_gains_too_little() -> None:
    problem = OrderProblem((SPLIT_IS_SLOW, SPLIT_IS_SLOW), (0, 1), chunks=8)
    assert search_orders(problem, effort=5_000).origin == "searched"
    assert search_orders(problem, effort=5_000, least_gain=0.2).origin == "1f1b"


@pytest.mark.parametrize("devices", range(2, 13))
def test_every_order_is_legal_and_goes_there_and_back(devices: int) -> None:
    for chunks in (1, 2, devices, 2 * devices + 1):
        for _, made in v_orders(chunks, devices):
            check_order(made, 2 * devices, chunks)
            placed = {action.partition: worker for worker, own in enumerate(made) for action in own}
            assert tuple(placed[partition] for partition in range(2 * devices)) == v_shaped(devices)


@pytest.mark.parametrize("devices", [4, 8, 16])
@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_for_equal_times_memory_and_bubble_are_at_most_the_published_ones(name: str, devices: int) -> None:
    chunks = 3 * devices
    kept, bubble = v_published(devices, chunks)[name]
    problem = v_problem([EQUAL_TIMES] * (2 * devices), devices, chunks, kept)
    fitting = [made for its, made in v_orders(chunks, devices) if its == name and problem.fits(made)]
    bubbles = [1 - problem.busiest(made) / problem.step_of(made) for made in fitting]
    assert min(bubbles) <= bubble


def test_the_first_device_of_v_min_for_two_devices_and_two_micro_batches_runs_this() -> None:
    _, first = next((name, made) for name, made in v_orders(2, 2) if name == "v_min")
    assert " ".join(map(str, first[0])) == "F0.0 F3.0 I3.0 W3.0 F0.1 I0.0 W0.0 F3.1 I3.1 W3.1 I0.1 W0.1"
