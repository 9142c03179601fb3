"""How long a step of a plan takes, and a lower bound of it for a shape, whatever its balance. Pure Python and NumPy.

A step is simulated action by action, or all devices at once if the actions are too many. The latter is for thousands of
devices and millions of actions, under schedules that follow a clock: each action has a tick, and what it needs is at an
earlier one on the neighbouring device. So `_Clock` advances all devices together, tick by tick, with one array
operation each. Beyond `MAX_TICKS` the pipeline has long been in a steady state, in which another round of micro-batches
always takes the same time: the difference of two shorter steps gives that time.

For the bound, a partition starts when the first micro-batch has passed all layers before its own, works through all
micro-batches, and then the last gradient travels back through those layers. No gradient reaches it before the first
micro-batch has passed all layers and come back. All devices together do all the work. A partition recomputes what it
must to fit its memory (`MemoryFit`); for the other partitions that is unknown, so the bound assumes the best.
"""

from __future__ import annotations

import copy
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple, final

import numpy as np

from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.plan.costs import LayerCosts, PrefixSums
from gpipe_cli.schedule.action import MODES, Checkpoint, checked_checkpoint, checkpointed_counts
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec

MAX_SIMULATED_ACTIONS = 200_000
"""A simulation of so many actions takes half a second."""
MAX_TICKS = 60_000
STEADY = 7
"""Rounds of one micro-batch per device after which the start no longer matters."""
LARGEST = sys.float_info.max
"""The largest finite cost; what does not fit costs infinity."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]


def step_ms(spec: PipelineSpec, costs: LayerCosts, balance: Sequence[int]) -> float:
    pipeline = max(simulated_step(spec, costs.partitions(balance, spec)), costs.host_ms(balance, spec))
    return pipeline + costs.update_ms(balance, spec)


def simulated_step(spec: PipelineSpec, costs: Sequence[PartitionCost]) -> float:
    """In milliseconds, or whatever unit the costs are in."""
    if 2 * spec.partitions * spec.micro_batches > MAX_SIMULATED_ACTIONS:
        return long_step(spec, costs)
    return spec.simulate(costs).step


def can_simulate(spec: PipelineSpec) -> bool:
    """Whether the step can be computed in seconds."""
    return 2 * spec.partitions * spec.micro_batches <= MAX_SIMULATED_ACTIONS or follows_clock(spec)


def follows_clock(spec: PipelineSpec) -> bool:
    """Whether the schedule follows a clock, and every worker has a device of its own."""
    devices = spec.devices or spec.partitions
    on_a_clock = spec.traits.ticks_per_micro_batch is not None
    return spec.cores is None and on_a_clock and spec.partitions % devices == 0


def long_step(spec: PipelineSpec, costs: Sequence[PartitionCost]) -> float:
    """The step of a pipeline with too many actions to simulate; there are no cores to share."""
    assert follows_clock(spec), "the caller asks can_simulate first"
    devices = spec.devices or spec.partitions
    # How many rounds of one micro-batch per device are added instead of run.
    ticks_per_micro_batch = 2 * spec.partitions // devices
    most = max((STEADY + 1) * devices, MAX_TICKS // ticks_per_micro_batch - 2 * devices)
    rounds = max(0, -(-(spec.micro_batches - most) // devices))
    if rounds == 0:
        return _Clock(spec, costs).run()
    shorter = [
        replace(spec, micro_batches=spec.micro_batches - out * devices) for out in (rounds, rounds + 1)
    ]
    step, before = (_Clock(short, costs).run() for short in shorter)
    return step + rounds * (step - before)


class _Wave(NamedTuple):
    """The devices that act at one tick; places are counted from the device where the direction begins."""

    places: Any
    """A slice if possible, which is several times as fast as indices."""
    following: Any
    """The places after these."""
    turns: Any
    micro_batches: Any
    begins: bool
    """Whether the first place is among them; then it comes first."""
    ends: bool
    """Whether the last one is; then it comes last."""


@final
class _Direction:
    """What crosses the boundaries in one direction: outputs, or gradients on their way back."""

    def __init__(self, durations: Numbers, transfers: Numbers, micro_batches: int) -> None:
        """Both by turn and place, in the order in which this direction passes them."""
        self.durations, self.transfers = durations, transfers
        turns, devices = durations.shape
        # When the latest tensor arrived at each place; the first place never waits in its first turn.
        self.arrived = np.zeros(devices + 1)
        # Between turns a tensor goes from the last place to the first, and waits there for more than one tick.
        self.between = np.zeros((turns, micro_batches))

    def arrivals(self, wave: _Wave) -> Numbers:
        arrivals: Numbers = self.arrived[wave.places].copy()
        if wave.begins and np.ndim(wave.turns) and wave.turns[0] > 0:
            arrivals[0] = self.between[wave.turns[0] - 1, wave.micro_batches[0]]
        return arrivals

    def send(self, wave: _Wave, ends: Numbers) -> None:
        sent = ends + self.transfers[wave.turns, wave.places]
        self.arrived[wave.following] = sent
        if wave.ends and np.ndim(wave.turns):
            self.between[wave.turns[-1], wave.micro_batches[-1]] = sent[-1]


@final
class _Clock:
    def __init__(self, spec: PipelineSpec, costs: Sequence[PartitionCost]) -> None:
        self._devices = spec.devices or spec.partitions
        if self._devices == 1:  # nothing leaves the device
            costs = [replace(cost, transfer=0.0) for cost in costs]
        self._turns = spec.partitions // self._devices
        self._micro_batches = spec.micro_batches
        # 1: every device acts at every tick; 2: forwards and backwards alternate. With several turns the next device
        # is two ticks later, so that all devices act in the same ticks: they count as one.
        self._stride = spec.traits.ticks_per_micro_batch or 2 if self._turns == 1 else 1

        def by_turn(numbers: Iterable[float]) -> Numbers:
            return np.array(list(numbers)).reshape(self._turns, self._devices)

        self._forward = _Direction(
            by_turn(cost.forward for cost in costs),
            by_turn(cost.transfer for cost in costs),
            self._micro_batches,
        )
        backwards = list(reversed(costs))
        # A gradient crosses the boundary that its input crossed, whose transfer is the previous partition's.
        self._backward = _Direction(
            by_turn(cost.backward for cost in backwards),
            by_turn(cost.transfer for cost in [*backwards[1:], PartitionCost(0, 0)]),
            self._micro_batches,
        )
        self._recompute = by_turn(cost.recompute for cost in backwards)
        self._recomputes = any(spec.checkpointed_counts)
        self._stops = by_turn(reversed(spec.checkpointed_counts))
        self._free = np.zeros(self._devices)
        self._free_from_behind = self._free[::-1]  # a view of the same numbers

    def run(self) -> float:
        last = self._devices - 1
        rounds = -(-self._micro_batches // self._devices) if self._turns > 1 else 0
        slots = rounds * self._turns * self._devices or self._micro_batches
        if self._turns > 1:
            turning = (self._turns - 1) * self._devices + last
        else:
            turning = (1 if self._stride == 2 else self._micro_batches) + last
        for tick in range(turning + self._stride * slots + last):
            if (wave := self._wave(tick, slots)) is not None:
                begins = np.maximum(self._free[wave.places], self._forward.arrivals(wave))
                self._free[wave.places] = ends = begins + self._forward.durations[wave.turns, wave.places]
                self._forward.send(wave, ends)
            if (wave := self._wave(tick - turning, slots)) is not None:
                begins = self._free_from_behind[wave.places] + self._recomputing(wave)
                begins = np.maximum(begins, self._backward.arrivals(wave))
                ends = begins + self._backward.durations[wave.turns, wave.places]
                self._free_from_behind[wave.places] = ends
                self._backward.send(wave, ends)
        return float(self._free.max())

    def _wave(self, tick: int, slots: int) -> _Wave | None:
        stride = self._stride
        first = max(0, tick - stride * (slots - 1))
        first += (tick - first) % stride
        end = min(self._devices - 1, tick) + 1
        if first >= end:
            return None
        if self._turns == 1:
            latest = (tick - first) // stride
            numbers = np.arange(latest, latest - len(range(first, end, stride)), -1)
            return _Wave(
                slice(first, end, stride), slice(first + 1, end + 1, stride), 0, numbers, False, False
            )
        places = np.arange(first, end, stride)
        group, rest = np.divmod((tick - places) // stride, self._turns * self._devices)
        turns, place = np.divmod(rest, self._devices)
        micro_batches = group * self._devices + place
        exist = micro_batches < self._micro_batches
        places = places[exist]
        if not len(places):
            return None
        return _Wave(
            places,
            places + 1,
            turns[exist],
            micro_batches[exist],
            begins=places[0] == 0,
            ends=places[-1] == self._devices - 1,
        )

    def _recomputing(self, wave: _Wave) -> Any:
        if not self._recomputes:
            return 0.0
        place = wave.turns, wave.places
        return np.where(wave.micro_batches < self._stops[place], self._recompute[place], 0.0)


@final
class MemoryFit:
    """Which layers a partition may have, and what it must recompute to fit its memory."""

    def __init__(self, memories: Mapping[str, MemoryObjective | None]) -> None:
        """The modes to choose from, least recomputation first, each with its memory; None: everything fits."""
        self._memories = memories
        self._borders: Sequence[int] | None = None

    @property
    def modes(self) -> Sequence[str]:
        return tuple(self._memories)

    @property
    def only(self) -> str | None:
        """The mode of all partitions, if any layers fit; None if that depends on the layers."""
        (mode, memory), *others = self._memories.items()
        return mode if memory is None or (not others and memory.limit is None) else None

    def mode(self, partition: int, begin: int, end: int) -> str | None:
        """The least recomputation with which a partition of the layers from `begin` to `end` fits; None if none does.

        Each layer added at the end can only make it more. Recomputing more never makes a step shorter.
        """
        if self._borders is not None:
            begin, end = self._borders[begin], self._borders[end]
        for mode, memory in self._memories.items():
            if memory is None or memory.allows(partition, begin, end):
                return mode
        return None

    def grouped(self, borders: Sequence[int]) -> MemoryFit:
        """The fit of partitions that consist of groups of layers, with these borders."""
        other = copy.copy(self)
        other._borders = borders
        return other

    @property
    def without_limit(self) -> MemoryFit:
        return MemoryFit(dict.fromkeys(self._memories))

    def checkpoint(self, balance: Sequence[int]) -> Checkpoint | None:
        """The modes of all partitions of a balance; None if it does not fit."""
        modes = []
        for partition, (begin, end) in enumerate(pairwise([0, *accumulate(balance)])):
            mode = self.mode(partition, begin, end)
            if mode is None:
                return None
            modes.append(mode)
        return checked_checkpoint(modes, len(modes))


@final
class StepBound:
    """An objective for the solver: no step in which a partition has the layers from `begin` to `end` is shorter."""

    def __init__(self, costs: LayerCosts, spec: PipelineSpec, fit: MemoryFit) -> None:
        self.layers = costs.layers
        self._costs, self._sums, self._fit = costs, _sums(costs, fit), fit
        devices = spec.devices or spec.partitions
        self._on = [_sums(costs.on(partition), fit) for partition in range(min(devices, spec.partitions))]
        self._micro_batches = spec.micro_batches
        self._recomputed = {mode: checkpointed_counts(mode, 1, spec.micro_batches)[0] for mode in fit.modes}
        self._splits = spec.traits.splits_backward
        self._least_split = _least_split(costs, spec)
        self._part_going_back = min(1.0, costs.split.input_grad)
        self._work = _work(costs, self._sums, spec, min(self._recomputed.values()))
        self._update = costs.least_update_ms(devices)
        self._free = fit.only if costs.equal_devices else None
        # A layer added in front shortens the way to the partition by less than it adds to it. But it may have a smaller
        # input, so that less must be recomputed.
        self.grows_backwards = fit.only is not None
        self._busy = [] if self._free is None else self._busy_up_to(self._recomputed[self._free])

    def cost(self, partition: int, begin: int, end: int) -> float:
        mode = self._fit.mode(partition, begin, end)
        if mode is None:
            return inf
        forward, backward = self._sums
        many, way = self._micro_batches, forward[begin]
        recompute = self._recomputed[mode] * self._costs.on(partition).recompute(begin, end)
        own = self._on[partition % len(self._on)]
        own_forward, own_backward = (
            own.forward[end] - own.forward[begin],
            own.backward[end] - own.backward[begin],
        )
        if self._splits:
            # Only input gradients travel back; weight gradients may come after the last one.
            busy = many * (own_forward + own_backward * self._least_split) + recompute
            part = self._part_going_back
            turned_round = forward[-1] + part * (backward[-1] + (many - 1) * own_backward)
            turned = forward[-1] + part * (backward[-1] - backward[end])
            to_its_weights = turned + many * self._least_split * own_backward
            return max(way + busy, turned_round, to_its_weights, self._work) + self._update
        round_trip = way + many * (own_forward + own_backward) + recompute + backward[begin]
        turned_round = forward[-1] + backward[-1] + (many - 1) * own_backward
        return max(round_trip, turned_round, self._work) + self._update

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        if self._free is not None:
            return self._furthest_of_all(partition, begin, limit)
        limit = min(limit, LARGEST)
        reach = 1  # doubled, since adding up memory far beyond the limit takes long
        while begin + reach < self.layers and self.cost(partition, begin, begin + reach) <= limit:
            reach *= 2
        # A partition with one layer more at its end never costs less, which is what bisecting relies on.
        ends = range(begin + 1, min(begin + reach, self.layers) + 1)
        return begin + bisect_right(ends, limit, key=lambda end: self.cost(partition, begin, end))

    def _furthest_of_all(self, partition: int, begin: int, limit: float) -> int:
        """`furthest` where everything fits: it bisects sums instead of computing costs."""
        whole_limit, limit = limit, limit - self._update
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
        # The sums were added in another order and may differ in the last bit; the cost decides.
        while end > begin and self.cost(partition, begin, end) > whole_limit:
            end -= 1
        while end < self.layers and self.cost(partition, begin, end + 1) <= whole_limit:
            end += 1
        return end

    def _busy_up_to(self, recomputed: int) -> list[float]:
        """What a partition does in a step, summed up to each layer."""
        return [
            self._micro_batches * (forward + backward * self._least_split)
            + recomputed * self._costs.recompute(0, end)
            for end, (forward, backward) in enumerate(zip(*self._sums, strict=True))
        ]


def least_step(costs: LayerCosts, spec: PipelineSpec) -> float:
    """A bound of the step, whatever is recomputed, that does not depend on the balance."""
    forward, backward = costs.least
    stops = checkpointed_counts(spec.checkpoint, 1, spec.micro_batches) if spec.checkpoint in MODES else (0,)
    work = _work(costs, costs.least, spec, stops[0])
    part = min(1.0, costs.split.input_grad) if spec.traits.splits_backward else 1.0
    return max(work, forward[-1] + part * backward[-1]) + costs.least_update_ms(
        spec.devices or spec.partitions
    )


def _work(costs: LayerCosts, sums: PrefixSums, spec: PipelineSpec, recomputed: int) -> float:
    """All work, evenly divided among the workers, unless launching it takes longer."""
    workers = min(spec.devices or spec.partitions, spec.cores or spec.partitions)
    once = sums.forward[-1] + sums.backward[-1] * _least_split(costs, spec)
    # A partition may end before the first trained layer, and then recomputes nothing.
    recompute = recomputed * costs.recompute(costs.frozen_layers, costs.layers)
    return max((spec.micro_batches * once + recompute) / workers, costs.least_host_ms(spec))


def _least_split(costs: LayerCosts, spec: PipelineSpec) -> float:
    """The least a backward takes, as a multiple of the whole: the first partition's is not split."""
    if not spec.traits.splits_backward:
        return 1.0
    return min(1.0, costs.split.input_grad + costs.split.weight_grad)


def _sums(costs: LayerCosts, fit: MemoryFit) -> PrefixSums:
    """The sums that hold for any partition, as far as it is known whether it recomputes."""
    if "never" not in fit.modes:
        return costs.checkpointed
    return costs.without_recompute if len(fit.modes) == 1 else costs.least
