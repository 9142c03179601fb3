"""Orders for plans and runs: every placement is tried, a simpler order is kept unless another one gains enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.order_plans import bubble_by_memory, order_problems, search_order
from gpipe_cli.schedule.order_check import check_order
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec

COST = PartitionCost(
    10, 20, input_grad=10, weight_grad=10, saved_bytes=100, input_bytes=10, resident_bytes=1000
)


def test_two_partitions_per_device_are_tried_in_turn_and_there_and_back() -> None:
    spec = PipelineSpec("interleaved", 4, 4, devices=2)
    problems = order_problems(spec, [COST] * 4)
    assert [problem.workers for problem in problems] == [(0, 1, 0, 1), (0, 1, 1, 0)]
    assert len(order_problems(spec, [COST] * 4, equal_devices=False)) == 1
    assert len(order_problems(PipelineSpec("1f1b", 2, 4), [COST] * 2)) == 1
    found = search_order(problems)
    check_order(found.schedule.given, 4, 4)
    assert found.result.step <= min(spec.simulate([COST] * 4).step, 2 * 4 * 40)


def test_the_bound_is_for_all_placements() -> None:
    """There and back is shorter here, but by too little to be preferred, and than the bound of the other placement."""
    spec = PipelineSpec("interleaved", 4, 32, devices=2)
    costs = [replace(COST, forward=10 + 0.05 * (place % 2)) for place in range(4)]
    in_turn, v_shaped = order_problems(spec, costs)
    found = search_order([in_turn, v_shaped])
    assert found.result.bound == min(search_order([each]).result.bound for each in (in_turn, v_shaped))


def test_what_stays_on_a_device_leaves_less_for_activations() -> None:
    spec = PipelineSpec("1f1b", 2, 4)
    (problem,) = order_problems(spec, [COST, replace(COST, resident_bytes=1100)], limits=[1200] * 2)
    assert problem.memory == (200.0, 100.0)
    found = search_order([problem])
    assert found.problem.peaks(found.schedule.given) <= [200.0, 100.0]
    with pytest.raises(ConfigError, match="no order fits"):
        search_order(order_problems(spec, [COST] * 2, limits=[1050] * 2))


def test_the_curve_of_bubble_against_memory_falls() -> None:
    spec = PipelineSpec("1f1b", 4, 8)
    curve = bubble_by_memory(order_problems(spec, [COST] * 4), spec)
    assert [point.share for point in curve][-3:] == [1.0, 1.5, 2.0]
    assert curve[-1].bytes == 2 * 400
    bubbles = [point.bubble for point in curve]
    assert bubbles == sorted(bubbles, reverse=True) and bubbles[-1] < bubbles[0]
    without_sizes = [replace(COST, saved_bytes=0)] * 4
    assert bubble_by_memory(order_problems(spec, without_sizes), spec) == []
