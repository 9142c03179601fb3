"""How long a step of a plan takes: simulated action by action, or where those are too many, all workers at once."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_cli.plan.costs import Costs
from gpipe_cli.plan.wavefront import long_step, takes
from gpipe_cli.schedule.course import Course
from gpipe_cli.schedule.simulate import PartitionCost

__all__ = ["MOST_ACTIONS", "can_be_simulated", "simulated", "step_ms"]

MOST_ACTIONS = 200_000
"""Of one simulation: half a second."""


def step_ms(course: Course, costs: Costs, balance: Sequence[int]) -> float:
    return simulated(course, costs.partitions(balance, course))


def simulated(course: Course, parts: Sequence[PartitionCost]) -> float:
    if _actions(course) > MOST_ACTIONS:
        return long_step(course, parts)
    return course.simulate(parts).step


def can_be_simulated(course: Course) -> bool:
    """Whether there is a way to tell its step in seconds."""
    return _actions(course) <= MOST_ACTIONS or takes(course)


def _actions(course: Course) -> int:
    return 2 * course.partitions * course.micro_batches
