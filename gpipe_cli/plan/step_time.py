"""How long a step of a plan takes: simulated action by action, or all devices at once if the actions are too many.

The latter is for thousands of devices and millions of actions, under schedules that follow a clock: each action has a
tick, and what it needs is at an earlier one on the neighbouring device. So `_Clock` advances all devices together, tick
by tick, with one array operation each. Beyond `MAX_TICKS` the pipeline has long been in a steady state, in which
another round of micro-batches always takes the same time: the difference of two shorter steps gives that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np

from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec

MAX_SIMULATED_ACTIONS = 200_000
"""A simulation of so many actions takes half a second."""
MAX_TICKS = 60_000
STEADY = 7
"""Rounds of one micro-batch per device after which the start no longer matters."""

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
