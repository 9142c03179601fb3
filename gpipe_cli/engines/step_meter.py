"""What an engine of one process records of its steps: one timeline, and how busy the partitions are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

from gpipe_cli.accelerator.devices import peak_bytes
from gpipe_cli.engines.protocol import Utilization
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.profiling.timeline import ActionRecorder, StepTimeline

RECORDED_STEP = 3
"""Of an engine's life: the steps before it warm up. It is early, so that even a short run has one."""


@final
class StepMeter:
    """Records steps of a pipe: one early step in every run, and how busy the partitions are where somebody watches.

    Recording costs a few percent of a step of small layers, so an unwatched run records no other step.
    """

    def __init__(self, pipe: Pipe, *, watched: bool) -> None:
        """watched: record every step that is measured."""
        self._pipe, self._watched = pipe, watched
        self._record = ActionRecorder(pipe.devices)
        self._steps = 0
        self._last: StepTimeline | None = None

    def next_step(self, *, measured: bool) -> AbstractContextManager[None]:
        """Run the next step in this context, and ask for its facts afterwards."""
        self._steps += 1
        self._last = None
        is_recorded = self._steps == RECORDED_STEP or (self._watched and measured)
        return self._recording() if is_recorded else nullcontext()

    @property
    def timeline(self) -> StepTimeline | None:
        """The last step, if it is the one that every run records."""
        return self._last if self._steps == RECORDED_STEP else None

    @property
    def utilization(self) -> Utilization | None:
        """Of the last step, if it was recorded for somebody who watches."""
        step, devices = self._last, self._pipe.partition_devices
        if step is None or not self._watched:
            return None
        return Utilization(
            busy=tuple(step.partition(index).busy for index in devices),
            bubble=step.bubble,
            memory=tuple(map(peak_bytes, devices.values())),
        )

    @contextmanager
    def _recording(self) -> Iterator[None]:
        self._record.clear()
        self._pipe.recorder = self._record
        try:
            yield
        finally:
            self._pipe.recorder = None
        self._last = StepTimeline(tuple(self._record.spans()))
