"""The search for an order of a pipeline whose balance is known: every placement of its partitions, and the best order.

Partitions are dealt to the devices in turn or, where each device has two, also there and back: the first device then
has the first and the last partition. Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import final

from gpipe_cli.errors import ConfigError
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.own_orders import AUTO, similar_schedule
from gpipe_cli.schedule.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.search import SearchResult, memory_curve, search, v_shaped
from gpipe_cli.schedule.search_problem import SearchProblem
from gpipe_cli.schedule.simulate import PartitionCost

EFFORT = 100_000
"""Actions scheduled for one placement: about a second."""
POLICIES = 500
"""At most so many orders are built for one placement; a short pipeline gains nothing from more."""
CURVE_EFFORT, CURVE_POLICIES = 20_000, 100
"""The same for each point of the curve of bubble against memory."""
SHARES = (1 / 3, 0.5, 0.75, 1.0, 1.5, 2.0)
"""The memory of the curve, as multiples of what the usual schedule keeps."""
LEAST_GAIN = 0.01
"""A split backward or another placement must shorten the step by this share to be preferred to a simpler order:
costs are not known more precisely."""


@final
@dataclass(frozen=True)
class SearchedOrder:
    schedule: FixedOrder
    result: SearchResult
    problem: SearchProblem
    """With the placement that was best."""


def order_problems(
    spec: PipelineSpec,
    costs: Sequence[PartitionCost],
    limits: Sequence[int] = (),
    *,
    equal_devices: bool = True,
) -> list[SearchProblem]:
    """One for each placement. `costs` are those of the partitions, `limits` the memory of each device; none: no limit.

    equal_devices: whether the costs hold on every device, so that partitions may be placed in another way.
    """
    devices = spec.devices or spec.partitions
    placements = [tuple(partition % devices for partition in range(spec.partitions))]
    if equal_devices and devices > 1 and spec.partitions == 2 * devices:
        placements.append(v_shaped(devices))
    return [
        SearchProblem(
            tuple(costs),
            workers,
            spec.micro_batches,
            _memory(costs, workers, limits[:devices]),
            spec.checkpoint_stops,
            cores=spec.cores,
        )
        for workers in placements
    ]


def search_order(problems: Sequence[SearchProblem]) -> SearchedOrder:
    """The best order of all placements, whose bound is for all of them; ConfigError if none fits the memory."""
    best: SearchedOrder | None = None
    bound = inf
    refused: ConfigError | None = None
    for problem in problems:
        try:
            effort = min(EFFORT, POLICIES * 3 * problem.partitions * problem.chunks)
            result = search(problem, effort, LEAST_GAIN)
        except ConfigError as error:
            refused = error
            continue
        bound = min(bound, result.bound)
        if best is None or result.step < best.result.step * (1 - LEAST_GAIN):
            best = SearchedOrder(FixedOrder(AUTO, result.order), result, problem)
    if best is None:
        assert refused is not None, "there is a placement"
        raise refused
    return replace(best, result=replace(best.result, bound=bound))


@final
@dataclass(frozen=True)
class MemoryPoint:
    """The bubble of the best order that keeps within some memory."""

    share: float
    """Of what the usual schedule keeps on the device that keeps most."""
    bytes: float
    """For activations, on each device."""
    bubble: float
    """The idle share of the busiest device."""


def bubble_by_memory(problems: Sequence[SearchProblem], spec: PipelineSpec) -> list[MemoryPoint]:
    """The curve of bubble against memory over all placements; empty if nothing is known about memory."""
    usual = replace(spec, schedule=similar_schedule(spec.partitions, problems[0].devices))
    most = max(problems[0].peaks(usual.order))
    if not most:
        return []
    bubbles: dict[float, float] = {}
    for problem in problems:
        limited = replace(problem, memory=(most,) * problem.devices)
        effort = min(CURVE_EFFORT, CURVE_POLICIES * 3 * problem.partitions * problem.chunks)
        for share, bubble in memory_curve(limited, SHARES, effort):
            bubbles[share] = min(bubble, bubbles.get(share, 1.0))
    return [MemoryPoint(share, share * most, bubbles[share]) for share in sorted(bubbles)]


def _memory(
    costs: Sequence[PartitionCost], workers: Sequence[int], limits: Sequence[int]
) -> tuple[float, ...]:
    """What each device has left for activations, besides parameters, gradients and the optimizer's state."""
    if not limits:
        return ()
    left = list(map(float, limits))
    for cost, worker in zip(costs, workers, strict=True):
        left[worker] -= cost.resident_bytes
    return tuple(max(1.0, bytes) for bytes in left)
