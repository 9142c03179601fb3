"""All that a plan decides besides its balance, and which such shapes are worth looking at.

Knows nothing of costs: what is too slow or too large is for the search to find out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from gpipe_cli.schedule.checkpoint import Checkpoint
from gpipe_cli.schedule.course import Course

__all__ = ["CHECKPOINTS", "FITTED", "Shape", "Space", "powers_of_two"]

CHECKPOINTS = ("never", "except_last", "always")
SCHEDULES = ("1f1b", "gpipe", "zero_bubble", "interleaved")
FITTED = "fitted"
"""Not a mode: every partition has one of its own, that which recomputes least among those that fit its memory."""
TURNS = (2, 4)
"""Partitions of one device under `interleaved`; with one it is 1f1b."""


@final
@dataclass(frozen=True)
class Shape:
    partitions: int
    devices: int
    chunks: int
    schedule: str
    checkpoint: Checkpoint
    """FITTED: to be found for each balance."""

    def course(self, cores: int | None = None) -> Course:
        return Course(self.schedule, self.partitions, self.chunks, self.checkpoint, self.devices, cores)

    @property
    def actions(self) -> int:
        return 2 * self.partitions * self.chunks


@final
@dataclass(frozen=True)
class Space:
    """What may be chosen."""

    layers: int
    devices: Sequence[int]
    """How many of them may be used."""
    chunks: Sequence[int]
    schedules: Collection[str] = SCHEDULES
    checkpoints: Collection[str] = CHECKPOINTS
    partitions: int | None = None
    """Fixed, where given."""
    fitted: bool = False
    """Whether partitions may differ in what they recompute: worth a look where memory is limited."""
    _turns: Sequence[int] = field(default=TURNS)

    def shapes(self) -> Iterator[Shape]:
        """Each once; what cannot run, or is another one under a second name, is left out."""
        for devices in self.devices:
            for chunks in self.chunks:
                if devices == 1:
                    yield from self._alone(chunks)
                elif chunks > 1:  # a single micro-batch keeps one device busy at a time
                    yield from self._pipelines(devices, chunks)

    def _alone(self, chunks: int) -> Iterator[Shape]:
        if self.partitions not in (None, 1) or not {"1f1b", "gpipe"} & set(self.schedules):
            return
        # 1f1b and gpipe take the same time on one device, and 1f1b needs less memory.
        schedule = "1f1b" if "1f1b" in self.schedules else "gpipe"
        for checkpoint in self._modes(chunks):
            yield Shape(1, 1, chunks, schedule, checkpoint)

    def _pipelines(self, devices: int, chunks: int) -> Iterator[Shape]:
        for schedule in self.schedules:
            for turns in self._turns if schedule == "interleaved" else (1,):
                partitions = devices * turns
                if partitions > self.layers or self.partitions not in (None, partitions):
                    continue
                modes = self._modes(chunks)
                for checkpoint in [*modes, FITTED] if self.fitted and len(modes) > 1 else modes:
                    yield Shape(partitions, devices, chunks, schedule, checkpoint)

    def _modes(self, chunks: int) -> list[str]:
        """With one micro-batch `except_last` is `never`, which every space that has one of them may name."""
        modes = [mode for mode in CHECKPOINTS if mode in self.checkpoints]
        return [mode for mode in modes if not (chunks == 1 and mode == "except_last" and "never" in modes)]


def powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]
