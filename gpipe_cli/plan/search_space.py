"""Everything that a plan decides besides its balance, and which of these shapes the search examines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from gpipe_cli.schedule import ScheduleModule, names, traits
from gpipe_cli.schedule.action import Checkpoint
from gpipe_cli.schedule.spec import PipelineSpec

CHECKPOINTS = ("never", "except_last", "always")
FITTED = "fitted"
"""Not a mode: each partition has its own, the one with the least recomputation that fits its memory."""
TURNS = (2, 4)
"""Partitions per device for a schedule that runs several; with one it is the same as one that does not."""


@final
@dataclass(frozen=True)
class PlanShape:
    partitions: int
    devices: int
    chunks: int
    schedule: str | ScheduleModule
    """By its name, or an order that was searched for."""
    checkpoint: Checkpoint
    """FITTED: depends on the balance."""

    def spec(self, cores: int | None = None) -> PipelineSpec:
        return PipelineSpec(self.schedule, self.partitions, self.chunks, self.checkpoint, self.devices, cores)

    @property
    def schedule_name(self) -> str:
        return traits(self.schedule).name

    @property
    def is_plain(self) -> bool:
        """Whether this is training without a pipeline."""
        return self.devices == 1 and self.checkpoint == "never"

    @property
    def actions(self) -> int:
        return 2 * self.partitions * self.chunks


@final
@dataclass(frozen=True)
class SearchSpace:
    """What a plan may choose from."""

    layers: int
    devices: Sequence[int]
    """The numbers of devices that may be used."""
    chunks: Sequence[int]
    schedules: Collection[str] = field(default_factory=lambda: searched_schedules())
    checkpoints: Collection[str] = CHECKPOINTS
    partitions: int | None = None
    """None: any number."""
    fitted: bool = False
    """Whether partitions may differ in what they recompute: worth searching if memory is limited."""
    _turns: Sequence[int] = field(default=TURNS)

    def shapes(self) -> Iterator[PlanShape]:
        """Each once; those that cannot run, or equal another one, are left out."""
        for devices in self.devices:
            for chunks in self.chunks:
                if devices == 1:
                    yield from self._on_one_device(chunks)
                elif chunks > 1:  # a single micro-batch keeps one device busy at a time
                    yield from self._pipelines(devices, chunks)

    def _on_one_device(self, chunks: int) -> Iterator[PlanShape]:
        plain = [
            name
            for name in self.schedules
            if not (traits(name).splits_backward or traits(name).several_per_device)
        ]
        if self.partitions not in (None, 1) or not plain:
            return
        # On one device all of them take the same time, so the one that keeps the fewest micro-batches alive is best.
        schedule = min(plain, key=lambda name: PipelineSpec(name, 1, chunks).peaks[0].bytes(graph=1, input=0))
        for checkpoint in self._modes(chunks):
            yield PlanShape(1, 1, chunks, schedule, checkpoint)

    def _pipelines(self, devices: int, chunks: int) -> Iterator[PlanShape]:
        for schedule in self.schedules:
            for turns in self._turns if traits(schedule).several_per_device else (1,):
                partitions = devices * turns
                if partitions > self.layers or self.partitions not in (None, partitions):
                    continue
                modes = self._modes(chunks)
                for checkpoint in [*modes, FITTED] if self.fitted and len(modes) > 1 else modes:
                    yield PlanShape(partitions, devices, chunks, schedule, checkpoint)

    def _modes(self, chunks: int) -> list[str]:
        """With one micro-batch `except_last` equals `never`, so it is left out if that may be chosen."""
        modes = [mode for mode in CHECKPOINTS if mode in self.checkpoints]
        return [mode for mode in modes if not (chunks == 1 and mode == "except_last" and "never" in modes)]


def searched_schedules() -> list[str]:
    """All shipped ones, simple ones first: of equally good plans the first is shown."""
    return sorted(names(), key=lambda name: (traits(name).several_per_device, traits(name).splits_backward))


def powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]
