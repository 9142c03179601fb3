"""Below which no step of a shape can be, whatever its balance. Pure Python.

A partition begins when the micro-batch has come through all layers before its own, works through all micro-batches,
and then the last gradient has the way back through those layers; and no gradient comes to it before the first
micro-batch has been through all layers and back to it. All devices together do all the work.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import final

from gpipe_cli.plan.costs import Costs
from gpipe_cli.schedule.course import Course

__all__ = ["StepBound"]

SPLITS_BACKWARD = ("zero_bubble",)


@final
class StepBound:
    """For the solver: no step is shorter in which some partition has the layers from `begin` up to `end`."""

    grows_backwards = False  # a layer in front shortens the way to the partition

    def __init__(self, costs: Costs, course: Course) -> None:
        self.layers = costs.layers
        self._costs = costs
        self._micro_batches, self._recomputed = course.micro_batches, course.checkpoint_stop
        self._splits = course.schedule in SPLITS_BACKWARD
        workers = min(course.devices or course.partitions, course.cores or course.partitions)
        backward = costs.backward[-1] * self._least_split
        self.work = (
            course.micro_batches * (costs.forward[-1] + backward)
            + course.checkpoint_stop * costs.recompute[-1]
        ) / workers
        """All work, evenly shared."""

    def cost(self, partition: int, begin: int, end: int) -> float:
        costs, many = self._costs, self._micro_batches
        forward = costs.forward[end] - costs.forward[begin]
        backward = costs.backward[end] - costs.backward[begin]
        recompute = costs.recompute[end] - costs.recompute[begin]
        if self._splits:
            # Only the gradients of inputs go back; those of weights may come after the last one.
            return max(
                costs.forward[begin]
                + many * (forward + backward * self._least_split)
                + self._recomputed * recompute,
                self.work,
            )
        busy = many * (forward + backward) + self._recomputed * recompute
        there_and_back = costs.forward[begin] + busy + costs.backward[begin]
        turned_round = costs.forward[-1] + costs.backward[-1] + (many - 1) * backward
        return max(there_and_back, turned_round, self.work)

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        ends = range(begin + 1, self.layers + 1)
        return begin + bisect_right(ends, limit, key=lambda end: self.cost(partition, begin, end))

    @property
    def _least_split(self) -> float:
        """What a backward takes at least, as a multiple of the whole: the first partition's is not split."""
        split = self._costs.split
        return min(1.0, split.input_grad + split.weight_grad) if self._splits else 1.0
