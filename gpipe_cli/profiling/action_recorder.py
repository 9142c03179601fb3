"""Records what the workers of a pipe did when: every piece of work with its thread.

with recording(pipe) as record:
    pipe.step(input, target, loss)
record.pieces()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch

from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.accelerator.streams import current_stream, record_timing_event, synchronize
from gpipe_cli.pipeline.gpipe import ThreadedPipe
from gpipe_cli.schedule.action import Action

TRANSFERS = ("load", "drop")
"""Phases in which a partition is loaded or dropped, and nothing is computed."""


class Piece(NamedTuple):
    """A piece of work, in seconds since recording began; `phase` is what the pipe calls it."""

    action: Action
    phase: str
    begin: float
    end: float
    thread: int

    @property
    def label(self) -> str:
        """F3 for the forward of micro-batch 3, R3 its recomputation, B3 its backward (I3 and W3 if that is split); load
        and drop of a partition."""
        if self.phase in TRANSFERS:
            return self.phase
        letter = {"recompute": "R", "copy": "copy "}.get(self.phase, self.action.kind.value)
        return f"{letter}{self.action.micro_batch}"


@contextmanager
def recording(pipe: ThreadedPipe) -> Iterator[ActionRecorder]:
    """Record the pipe's work inside the block."""
    record = ActionRecorder(pipe.devices)
    pipe.recorder = record
    try:
        yield record
    finally:
        pipe.recorder = None


@final
class ActionRecorder:
    """The recorder of a pipe. All that a worker does is append to a list, which is atomic and needs no lock."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._pieces: list[tuple[Action, str, Any, Any, int]] = []
        self._accelerators = {device for device in devices if is_accelerator(device)}
        self._began = time.perf_counter()
        self.clear()

    def now(self, device: torch.device) -> Any:
        # On an accelerator a call returns before its work has run, so the moment is an event in the stream. Reading it
        # here would make the worker wait; `pieces` does so when all is done.
        return record_timing_event(current_stream(device)) if is_accelerator(device) else time.perf_counter()

    def __call__(self, action: Action, phase: str, begin: Any, end: Any) -> None:
        self._pieces.append((action, phase, begin, end, threading.get_native_id()))

    def pieces(self) -> list[Piece]:
        """In the order in which they ended; waits until the devices have run them."""
        synchronize(self._accelerators)
        return [
            Piece(action, phase, self._seconds(begin), self._seconds(end), thread)
            for action, phase, begin, end, thread in self._pieces
        ]

    def clear(self) -> None:
        """Forget the pieces; call it before each step of a long recording, for the precision of its times."""
        self._pieces.clear()
        # Events tell only the milliseconds since another event of their device, in single precision: 8 ms apart after a
        # day. So the origin moves along, and it is one moment on all devices because none of them has anything to run.
        synchronize(self._accelerators)
        self._origin = time.perf_counter()
        self._origins = {device: record_timing_event(current_stream(device)) for device in self._accelerators}

    def _seconds(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment - self._began
        return self._origin - self._began + self._origins[moment.device].elapsed_time(moment) / 1000
