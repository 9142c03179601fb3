"""What the workers of a pipe did when: every piece of work with its thread.

    with recording(pipe) as record:
        pipe.step(input, target, loss)
    record.pieces()

Decides what a moment is: on the CPU the clock's, on a CUDA device an event in its stream, because work is only
begun when its call returns; events are read when all is done. Costs two moments and a tuple per piece.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch

from gpipe_cli.pipeline.worked import WorkedSequence
from gpipe_cli.schedule.action import Action

__all__ = ["TRANSFERS", "Piece", "Record", "recording"]


TRANSFERS = ("load", "drop")
"""Phases in which a partition is brought in or put away, and nothing is computed."""


class Piece(NamedTuple):
    """A piece of work, in seconds since recording began; `phase` as a pipe's recorder gets it."""

    action: Action
    phase: str
    begin: float
    end: float
    thread: int

    @property
    def label(self) -> str:
        """F3 for the forward of micro-batch 3, R its recomputation, B its backward (I and W where that is split);
        load and drop of a partition.
        """
        if self.phase in TRANSFERS:
            return self.phase
        letter = {"recompute": "R", "copy": "copy "}.get(self.phase, self.action.kind.value)
        return f"{letter}{self.action.micro_batch}"


@contextmanager
def recording(pipe: WorkedSequence) -> Iterator[Record]:
    """Inside, the pipe's work is recorded."""
    record = Record(pipe.devices)
    pipe.recorder = record
    try:
        yield record
    finally:
        pipe.recorder = None


@final
class Record:
    """The recorder of a pipe. Appending to a list is all that a worker does, and needs no lock."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._pieces: list[tuple[Action, str, Any, Any, int]] = []
        cuda = {device for device in devices if device.type == "cuda"}
        for device in cuda:
            torch.cuda.synchronize(device)
        self._origin = time.perf_counter()
        # Events are told relative to each other: these are the ones that happen at the origin.
        self._origins = {device: _event(device) for device in cuda}

    def now(self, device: torch.device) -> Any:
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
