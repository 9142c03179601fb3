"""Below which no step of a shape can be, whatever its balance. Pure Python.

A partition begins when the micro-batch has come through all layers before its own, works through all micro-batches,
and then the last gradient has the way back through those layers; and no gradient comes to it before the first
micro-batch has been through all layers and back to it. All devices together do all the work. What a partition
recomputes is what it must to keep within its memory; of the others it is not known, so they are taken at their best.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from math import inf
from typing import final

from gpipe_cli.plan.costs import Costs, Sums
from gpipe_cli.plan.fit import Fit
from gpipe_cli.schedule.checkpoint import MODES, checkpoint_stops
from gpipe_cli.schedule.pipeline_spec import PipelineSpec

__all__ = ["StepBound", "least_step"]

LARGEST = sys.float_info.max
"""Short of what does not fit, which takes for ever."""


@final
class StepBound:
    """For the solver: no step is shorter in which some partition has the layers from `begin` up to `end`."""

    def __init__(self, costs: Costs, spec: PipelineSpec, fit: Fit) -> None:
        self.layers = costs.layers
        self._costs, self._sums, self._fit = costs, _sums(costs, fit), fit
        self._micro_batches = spec.micro_batches
        self._recomputed = {mode: checkpoint_stops(mode, 1, spec.micro_batches)[0] for mode in fit.modes}
        self._splits = spec.traits.splits_backward
        self._least_split = _least_split(costs, spec)
        self._part_going_back = min(1.0, costs.split.input_grad)
        self._work = _work(costs, self._sums, spec, min(self._recomputed.values()))
        self._free = fit.only
        # A layer in front shortens the way to the partition by less than it adds to it. But it may be one with a
        # smaller input, so that less must be recomputed.
        self.grows_backwards = self._free is not None
        self._busy = [] if self._free is None else self._busy_up_to(self._recomputed[self._free])

    def cost(self, partition: int, begin: int, end: int) -> float:
        mode = self._fit.mode(partition, begin, end)
        if mode is None:
            return inf
        forward, backward = self._sums
        many, way = self._micro_batches, forward[begin]
        recompute = self._recomputed[mode] * (self._costs.recompute[end] - self._costs.recompute[begin])
        own_forward, own_backward = forward[end] - forward[begin], backward[end] - backward[begin]
        if self._splits:
            # Only the gradients of inputs go back; those of weights may come after the last one.
            busy = many * (own_forward + own_backward * self._least_split) + recompute
            part = self._part_going_back
            turned_round = forward[-1] + part * (backward[-1] + (many - 1) * own_backward)
            turned = forward[-1] + part * (backward[-1] - backward[end])
            to_its_weights = turned + many * self._least_split * own_backward
            return max(way + busy, turned_round, to_its_weights, self._work)
        there_and_back = way + many * (own_forward + own_backward) + recompute + backward[begin]
        turned_round = forward[-1] + backward[-1] + (many - 1) * own_backward
        return max(there_and_back, turned_round, self._work)

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        if self._free is not None:
            return self._furthest_of_all(partition, begin, limit)
        limit = min(limit, LARGEST)
        reach = 1  # doubled, since memory far beyond the limit is long to add up
        while begin + reach < self.layers and self.cost(partition, begin, begin + reach) <= limit:
            reach *= 2
        ends = range(begin + 1, min(begin + reach, self.layers) + 1)
        return begin + bisect_right(ends, limit, key=lambda end: self.cost(partition, begin, end))

    def _furthest_of_all(self, partition: int, begin: int, limit: float) -> int:
        """The same where all fits: by looking up sums instead of asking for costs."""
        if self._work > limit:
            return begin
        forward, backward = self._sums
        way = forward[begin] + (0.0 if self._splits else backward[begin])
        end = bisect_right(self._busy, limit - way + self._busy[begin], begin) - 1
        part = self._part_going_back if self._splits else 1.0
        rest = limit - forward[-1] - part * backward[-1]
        if (turning := part * (self._micro_batches - 1)) > 0:
            end = min(end, bisect_right(backward, rest / turning + backward[begin], begin) - 1)
        weights = self._micro_batches * self._least_split
        if self._splits and weights > part:
            most = (rest + weights * backward[begin]) / (weights - part)
            end = min(end, bisect_right(backward, most, begin) - 1)
        end = max(begin, end)
        # Sums were added up in another order: what counts is the cost.
        while end > begin and self.cost(partition, begin, end) > limit:
            end -= 1
        while end < self.layers and self.cost(partition, begin, end + 1) <= limit:
            end += 1
        return end

    def _busy_up_to(self, recomputed: int) -> list[float]:
        """What a partition does in a step, summed up to each layer."""
        return [
            self._micro_batches * (there + back * self._least_split) + recomputed * again
            for there, back, again in zip(*self._sums, self._costs.recompute, strict=True)
        ]


def least_step(costs: Costs, spec: PipelineSpec) -> float:
    """Below which no step is, whatever is recomputed: known without a look at the layers."""
    there, back = costs.least
    stops = checkpoint_stops(spec.checkpoint, 1, spec.micro_batches) if spec.checkpoint in MODES else (0,)
    work = _work(costs, costs.least, spec, stops[0])
    part = min(1.0, costs.split.input_grad) if spec.traits.splits_backward else 1.0
    return max(work, there[-1] + part * back[-1])


def _work(costs: Costs, sums: Sums, spec: PipelineSpec, recomputed: int) -> float:
    """All work, evenly shared."""
    workers = min(spec.devices or spec.partitions, spec.cores or spec.partitions)
    once = sums.forward[-1] + sums.backward[-1] * _least_split(costs, spec)
    return (spec.micro_batches * once + recomputed * costs.recompute[-1]) / workers


def _least_split(costs: Costs, spec: PipelineSpec) -> float:
    """What a backward takes at least, as a multiple of the whole: the first partition's is not split."""
    if not spec.traits.splits_backward:
        return 1.0
    return min(1.0, costs.split.input_grad + costs.split.weight_grad)


def _sums(costs: Costs, fit: Fit) -> Sums:
    """Of any partition, as far as it is known whether it recomputes."""
    if "never" not in fit.modes:
        return costs.checkpointed
    return costs.kept if len(fit.modes) == 1 else costs.least
