"""Orders that are searched for, as plans: the best pipelines again, each with the best order of its balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.order_search import LEAST_GAIN, MemoryPoint, bubble_by_memory, search_order
from gpipe_cli.plan.prediction import Prediction
from gpipe_cli.plan.search import BestBalance, RankedPlan
from gpipe_cli.plan.search_space import PlanShape
from gpipe_cli.plan.step_time import step_ms
from gpipe_cli.schedule.own_orders import AUTO
from gpipe_cli.schedule.search_problem import SearchProblem

SEARCHED_PLANS = 3
"""How many of the best pipelines get an order of their own; each takes about a second."""
CONSIDERED_PLANS = 5
"""Orders are searched for pipelines among so many of the best plans, however many the user wants to see."""
MOST_ACTIONS = 20_000
"""Of a pipeline that gets an order."""


@final
@dataclass(frozen=True)
class OrderPlanner:
    problems_of: Callable[[Prediction, LayerCosts], list[SearchProblem]]
    """The search for an order of a plan's balance."""
    predict: Callable[[RankedPlan, LayerCosts, float | None], Prediction]
    cores: int | None

    def added_to(
        self, plans: Sequence[Prediction], costs: Callable[[PlanShape], LayerCosts], *, only: bool
    ) -> list[Prediction]:
        """The plans, best first, and with them those with a searched order that beat the same balance's best schedule.

        only: leave out every other pipeline; ConfigError if a considered plan is one, but no order was found.
        """
        pipelines = _pipelines(plans)
        searched = [
            found
            for plan in pipelines
            if (found := self._searched(plan, costs(plan.shape))) is not None
            and (only or found.step_ms <= plan.step_ms * (1 - LEAST_GAIN))
        ]
        if only and not searched and any(plan.shape.devices > 1 for plan in plans[:CONSIDERED_PLANS]):
            reason = "no order of the best pipelines fits the memory of the devices"
            if not pipelines:
                reason = f"the best pipelines have more than {MOST_ACTIONS:,} actions, too many to search"
            raise ConfigError(f"schedule={AUTO}: {reason}; leave it out")
        fixed = [plan for plan in plans if plan.shape.devices == 1 or not only]
        return sorted([*fixed, *searched], key=lambda plan: plan.step_ms)

    def memory_curve(
        self, plans: Sequence[Prediction], costs: Callable[[PlanShape], LayerCosts]
    ) -> list[MemoryPoint]:
        """The bubble against memory of the best pipeline; empty if there is none."""
        for plan in _pipelines(plans)[:1]:
            return bubble_by_memory(self.problems_of(plan, costs(plan.shape)), plan.shape.spec(self.cores))
        return []

    def _searched(self, plan: Prediction, costs: LayerCosts) -> Prediction | None:
        try:
            found = search_order(self.problems_of(plan, costs))
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
    """Those among the considered plans, each balance once; an order does not depend on the schedule it replaces."""
    chosen: dict[object, Prediction] = {}
    for plan in plans[:CONSIDERED_PLANS]:
        shape = plan.shape
        if shape.devices > 1 and shape.actions <= MOST_ACTIONS:
            chosen.setdefault((plan.balance, shape.devices, shape.chunks, shape.checkpoint), plan)
    return list(chosen.values())[:SEARCHED_PLANS]
