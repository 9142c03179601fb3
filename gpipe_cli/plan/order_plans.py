"""The search for an order of a pipeline whose balance is known: every placement of its partitions, and the best plans.

Partitions are dealt to the devices in turn or, where each device has two, also there and back: the first device then
has the first and the last partition. Pure Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, final

from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.order_problem import OrderProblem
from gpipe_cli.plan.order_search import OrderResult, memory_curve, search_orders, v_shaped
from gpipe_cli.plan.search import BestBalance, PlanShape, RankedPlan
from gpipe_cli.plan.step_time import step_ms
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.orders import AUTO, similar_schedule
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec

if TYPE_CHECKING:  # a search needs no torch
    from gpipe_cli.plan.prediction import Prediction

EFFORT = 100_000
"""Actions scheduled for one placement: about a second."""
POLICIES = 500
"""At most so many orders are built for one placement; a short pipeline gains nothing from more."""
CURVE_EFFORT, CURVE_POLICIES = 20_000, 100
"""Effort and policies for each point of the curve of bubble against memory."""
SHARES = (1 / 3, 0.5, 0.75, 1.0, 1.5, 2.0)
"""The memory of the curve, as multiples of what the usual schedule keeps."""
LEAST_GAIN = 0.01
"""A split backward or another placement must shorten the step by this share to be preferred to a simpler order:
costs are not known more precisely."""
SEARCHED_PLANS = 3
"""How many of the best pipelines get an order of their own; each takes about a second."""
CONSIDERED_PLANS = 5
"""Orders are searched for pipelines among so many of the best plans, however many the user wants to see."""
MAX_SEARCHED = 20_000
"""A pipeline with more actions gets no order."""


@final
@dataclass(frozen=True)
class SearchedOrder:
    schedule: FixedOrder
    result: OrderResult
    problem: OrderProblem
    """With the placement that was best."""


def order_problems(
    spec: PipelineSpec,
    costs: Sequence[PartitionCost],
    limits: Sequence[int] = (),
    *,
    equal_devices: bool = True,
) -> list[OrderProblem]:
    """One for each placement. `costs` are those of the partitions, `limits` the memory of each device; none: no limit.

    equal_devices: whether the costs hold on every device, so that partitions may be placed in another way.
    """
    devices = spec.devices or spec.partitions
    placements = [tuple(partition % devices for partition in range(spec.partitions))]
    if equal_devices and devices > 1 and spec.partitions == 2 * devices:
        placements.append(v_shaped(devices))
    return [
        OrderProblem(
            tuple(costs),
            workers,
            spec.micro_batches,
            _memory(costs, workers, limits[:devices]),
            spec.checkpointed_counts,
            cores=spec.cores,
        )
        for workers in placements
    ]


def search_order(problems: Sequence[OrderProblem], deadline: float = inf) -> SearchedOrder:
    """The best order of all placements, whose bound is for all of them; ConfigError if none fits the memory.

    From `deadline` on, a time of `time.monotonic`, each placement has only the orders that it needs to have one.
    """
    best: SearchedOrder | None = None
    bound = inf
    refused: ConfigError | None = None
    for problem in problems:
        try:
            effort = min(EFFORT, POLICIES * 3 * problem.partitions * problem.chunks)
            result = search_orders(problem, effort, LEAST_GAIN, deadline)
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
    """The memory as a multiple of what the usual schedule keeps on the device that keeps most."""
    bytes: float
    """The bytes for activations on each device."""
    bubble: float
    """The idle share of the busiest device."""


def bubble_by_memory(
    problems: Sequence[OrderProblem], spec: PipelineSpec, deadline: float = inf
) -> list[MemoryPoint]:
    """The curve of bubble against memory over all placements; empty if nothing is known about memory."""
    usual = replace(spec, schedule=similar_schedule(spec.partitions, problems[0].devices))
    most = max(problems[0].peaks(usual.order))
    if not most:
        return []
    bubbles: dict[float, float] = {}
    for problem in problems:
        limited = replace(problem, memory=(most,) * problem.devices)
        effort = min(CURVE_EFFORT, CURVE_POLICIES * 3 * problem.partitions * problem.chunks)
        for share, bubble in memory_curve(limited, SHARES, effort, deadline):
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


@final
@dataclass(frozen=True)
class OrderPlanner:
    problems_of: Callable[[Prediction, LayerCosts], list[OrderProblem]]
    """The search for an order of a plan's balance."""
    predict: Callable[[RankedPlan, LayerCosts, float | None], Prediction]
    cores: int | None
    deadline: float = inf
    """A time of `time.monotonic`."""

    def added_to(
        self, plans: Sequence[Prediction], costs: Callable[[PlanShape], LayerCosts], *, only: bool
    ) -> list[Prediction]:
        """The plans, best first, and with them those with a searched order that beat the same balance's best schedule.

        only: leave out every other pipeline; ConfigError if a considered plan is one, but no order was found.
        """
        pipelines = _pipelines(plans)
        searched: list[Prediction] = []
        for plan in pipelines:
            if time.monotonic() > self.deadline and (searched or not only):
                break
            found = self._searched(plan, costs(plan.shape))
            if found is not None and (only or found.step_ms <= plan.step_ms * (1 - LEAST_GAIN)):
                searched.append(found)
        if only and not searched and any(plan.shape.devices > 1 for plan in plans[:CONSIDERED_PLANS]):
            reason = "no order of the best pipelines fits the memory of the devices"
            if not pipelines:
                reason = f"the best pipelines have more than {MAX_SEARCHED:,} actions, too many to search"
            raise ConfigError(f"schedule={AUTO}: {reason}; remove it")
        fixed = [plan for plan in plans if plan.shape.devices == 1 or not only]
        return sorted([*fixed, *searched], key=lambda plan: plan.step_ms)

    def memory_curve(
        self, plans: Sequence[Prediction], costs: Callable[[PlanShape], LayerCosts]
    ) -> list[MemoryPoint]:
        """The bubble against memory of the best pipeline; empty if there is none, or no time."""
        pipelines = _pipelines(plans)
        if not pipelines or time.monotonic() > self.deadline:
            return []
        problems = self.problems_of(pipelines[0], costs(pipelines[0].shape))
        return bubble_by_memory(problems, pipelines[0].shape.spec(self.cores), self.deadline)

    def _searched(self, plan: Prediction, costs: LayerCosts) -> Prediction | None:
        try:
            found = search_order(self.problems_of(plan, costs), self.deadline)
        except ConfigError:
            # No order fits: the plan divides the memory of a device among its partitions in another way.
            return None
        shape = replace(plan.shape, schedule=found.schedule)
        spec = shape.spec(self.cores)
        step = step_ms(spec, costs, plan.balance)
        bound = min(step, found.result.bound + costs.update_ms(plan.balance, spec))
        best = BestBalance(plan.balance, plan.shape.checkpoint, step, bound)
        return self.predict(RankedPlan(shape, best), costs, None)


def _pipelines(plans: Sequence[Prediction]) -> list[Prediction]:
    """The pipelines of the considered plans, each balance once: an order is the same whatever it replaces."""
    chosen: dict[object, Prediction] = {}
    for plan in plans[:CONSIDERED_PLANS]:
        shape = plan.shape
        if shape.devices > 1 and shape.actions <= MAX_SEARCHED:
            chosen.setdefault((plan.balance, shape.devices, shape.chunks, shape.checkpoint), plan)
    return list(chosen.values())[:SEARCHED_PLANS]
