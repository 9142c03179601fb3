"""How busy the partitions of a pipe were in a step, from the record of its work; for who watches a run live.

Costs what recording costs, a few percent of a step of small layers, and is therefore only done where somebody looks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch

from gpipe_cli.pipeline.gpipe import ThreadedPipe
from gpipe_cli.profiling.action_recorder import ActionRecorder
from gpipe_cli.profiling.timeline import StepTimeline

__all__ = ["Gauge", "Utilisation"]


@final
@dataclass(frozen=True)
class Utilisation:
    """Of one step."""

    busy: tuple[float, ...]
    """The share of the step that each partition works."""
    bubble: float
    """The share of all workers' time in which they do nothing."""
    memory: tuple[int | None, ...]
    """The most bytes each partition's device has held so far; None where the device does not tell."""


@final
class Gauge:
    """Reads a pipe; what it saw last is in `last`."""

    def __init__(self, pipe: ThreadedPipe) -> None:
        self._pipe = pipe
        self._record = ActionRecorder(pipe.devices)
        self.last: Utilisation | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside is one step."""
        self._record.clear()
        self._pipe.recorder = self._record
        try:
            yield
        finally:
            self._pipe.recorder = None
        self.last = self._utilisation()

    def _utilisation(self) -> Utilisation:
        step = StepTimeline(tuple(self._record.pieces()))
        seconds: dict[int, float] = defaultdict(float)
        for piece in step.pieces:
            seconds[piece.action.partition] += piece.end - piece.begin
        partitions = range(len(self._pipe.partitions))
        devices = self._pipe.devices
        return Utilisation(
            busy=tuple(seconds[index] / step.seconds for index in partitions),
            bubble=step.bubble,
            memory=tuple(_held(devices[index % len(devices)]) for index in partitions),
        )


def _held(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
