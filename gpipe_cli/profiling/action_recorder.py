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
        cuda = {device for device in devices if device.type == "cuda"}
        for device in cuda:
            torch.cuda.synchronize(device)
        self._origin = time.perf_counter()
        # CUDA gives only the time between two events, so each device needs one at the origin.
        self._origins = {device: _event(device) for device in cuda}

    def now(self, device: torch.device) -> Any:
        # On a CUDA device a call returns before its work has run, so the moment is an event in the stream. Reading it
        # here would make the worker wait; `pieces` does so when all is done.
        return time.perf_counter() if device.type != "cuda" else (device, _event(device))

    def __call__(self, action: Action, phase: str, begin: Any, end: Any) -> None:
        self._pieces.append((action, phase, begin, end, threading.get_native_id()))

    def pieces(self) -> list[Piece]:
        """In the order in which they ended; for after the recording."""
        return [
            Piece(action, phase, self._seconds(begin), self._seconds(end), thread)
            for action, phase, begin, end, thread in self._pieces
        ]

    def clear(self) -> None:
        self._pieces.clear()

    def _seconds(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment - self._origin
        device, event = moment
        event.synchronize()
        return float(self._origins[device].elapsed_time(event)) / 1000


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
