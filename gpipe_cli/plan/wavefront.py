"""The step of a pipeline too long to be simulated action by action: thousands of devices, millions of actions.

    long_step(PipelineSpec("1f1b", partitions=4096, micro_batches=16384), costs)

In these schedules every action has a place on a clock, and what it needs stands one tick earlier on the neighbouring
device. So all devices are advanced together, tick by tick, with one array operation each. Beyond `MOST_TICKS` the
pipeline has long been in a steady state, in which another round of micro-batches always takes the same: that is
measured between two shorter steps, and added. There are no cores to share: devices are devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np

from gpipe_cli.schedule.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.simulate import PartitionCost

__all__ = ["long_step", "takes"]

MOST_TICKS = 60_000
STEADY = 3
"""Rounds of one micro-batch per device after which the beginning is forgotten."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]


def takes(spec: PipelineSpec) -> bool:
    """Whether the spec has a clock, and devices enough for its workers."""
    devices = spec.devices or spec.partitions
    on_a_clock = spec.traits.ticks_per_micro_batch is not None
    return spec.cores is None and on_a_clock and spec.partitions % devices == 0


def long_step(spec: PipelineSpec, costs: Sequence[PartitionCost]) -> float:
    """Milliseconds, or whatever unit the costs are in."""
    assert takes(spec), "asked only where it can answer"
    devices = spec.devices or spec.partitions
    rounds = _rounds_left_out(spec, devices)
    if rounds == 0:
        return _Clock(spec, costs).run()
    shorter = [
        replace(spec, micro_batches=spec.micro_batches - out * devices) for out in (rounds, rounds + 1)
    ]
    step, before = (_Clock(one, costs).run() for one in shorter)
    return step + rounds * (step - before)


def _rounds_left_out(spec: PipelineSpec, devices: int) -> int:
    """How many rounds of one micro-batch per device are added instead of run."""
    per_micro_batch = 2 * spec.partitions // devices
    most = max((STEADY + 1) * devices, MOST_TICKS // per_micro_batch - 2 * devices)
    return max(0, -(-(spec.micro_batches - most) // devices))


class _Wave(NamedTuple):
    """Who acts at one tick; places are counted from the device where the wave begins."""

    places: Any
    """A slice where one will do, which is several times as quick."""
    following: Any
    """The places one further on."""
    turns: Any
    micro_batches: Any
    begins: bool
    """Whether the first place is among them; then it comes first."""
    ends: bool
    """Whether the last one is; then it comes last."""


@final
class _Direction:
    """What goes over the borders one way: outputs, or gradients on their way back."""

    def __init__(self, durations: Numbers, transfers: Numbers, micro_batches: int) -> None:
        """By turn and place, in the order in which this direction takes them."""
        self.durations, self.transfers = durations, transfers
        turns, devices = durations.shape
        # The latest that has come to each place; nothing ever keeps the first one waiting in its first turn.
        self.arrived = np.zeros(devices + 1)
        # Between turns it goes from the last place to the first, later than one tick: kept by micro-batch.
        self.between = np.zeros((turns, micro_batches))

    def arrivals(self, wave: _Wave) -> Numbers:
        found: Numbers = self.arrived[wave.places].copy()
        if wave.begins and np.ndim(wave.turns) and wave.turns[0] > 0:
            found[0] = self.between[wave.turns[0] - 1, wave.micro_batches[0]]
        return found

    def send(self, wave: _Wave, ends: Numbers) -> None:
        sent = ends + self.transfers[wave.turns, wave.places]
        self.arrived[wave.following] = sent
        if wave.ends and np.ndim(wave.turns):
            self.between[wave.turns[-1], wave.micro_batches[-1]] = sent[-1]


@final
class _Clock:
    def __init__(self, spec: PipelineSpec, costs: Sequence[PartitionCost]) -> None:
        self._devices = spec.devices or spec.partitions
        self._turns = spec.partitions // self._devices
        self._micro_batches = spec.micro_batches
        # 1: every device acts at every tick; 2: forwards and backwards alternate.
        self._stride = spec.traits.ticks_per_micro_batch or 2

        def by_turn(numbers: Iterable[float]) -> Numbers:
            return np.array(list(numbers)).reshape(self._turns, self._devices)

        there, back = list(costs), list(reversed(costs))
        self._forward = _Direction(
            by_turn(one.forward for one in there), by_turn(one.transfer for one in there), self._micro_batches
        )
        # A gradient goes back over the border its input came by, which belongs to the partition before.
        self._backward = _Direction(
            by_turn(one.backward for one in back),
            by_turn(one.transfer for one in [*back[1:], PartitionCost(0, 0)]),
            self._micro_batches,
        )
        self._recompute = by_turn(one.recompute for one in back)
        self._recomputes = any(spec.checkpoint_stops)
        self._stops = by_turn(reversed(spec.checkpoint_stops))
        self._free = np.zeros(self._devices)
        self._free_from_behind = self._free[::-1]  # the same numbers

    def run(self) -> float:
        last = self._devices - 1
        rounds = -(-self._micro_batches // self._devices) if self._turns > 1 else 0
        slots = rounds * self._turns * self._devices or self._micro_batches
        turning = 2 * (self._turns - 1) * self._devices + 1 if self._stride == 2 else self._micro_batches
        turning += last
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
        there = micro_batches < self._micro_batches
        places = places[there]
        if not len(places):
            return None
        return _Wave(
            places,
            places + 1,
            turns[there],
            micro_batches[there],
            begins=places[0] == 0,
            ends=places[-1] == self._devices - 1,
        )

    def _recomputing(self, wave: _Wave) -> Any:
        if not self._recomputes:
            return 0.0
        place = wave.turns, wave.places
        return np.where(wave.micro_batches < self._stops[place], self._recompute[place], 0.0)
