"""Pinned host memory through which bytes pass between a file and an accelerator.

Two buffers for a whole tier, used in turn: the host fills one from the file while the device still copies the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import final

import torch
from torch import Tensor

from gpipe_cli.accelerator.devices import reads_pinned_memory
from gpipe_cli.accelerator.streams import finish_queued, has_side_streams, record_event

STAGING_BYTES = 2**25
"""Of one buffer: large enough for the full speed of disks and links, and a power of two, because torch rounds pinned
memory up to one."""


@final
class Staging:
    """Gives a buffer to one thread at a time, when the device is done with it.

    The host waits once for each piece of `STAGING_BYTES` that it reads from the device, and once before it overwrites
    a piece that the device has read.
    """

    def __init__(self, count: int = 2) -> None:
        self._free: SimpleQueue[_StagingBuffer] = SimpleQueue()
        for _ in range(count):
            self._free.put(_StagingBuffer())

    def load(self, into: Tensor, fill: Callable[[Tensor, int], None]) -> None:
        """Queue copies into memory of a device; `fill` writes the host's bytes from an offset on."""
        for begin, piece in _pieces(into):
            with self._buffer() as buffer:
                host = buffer.memory(piece.device)[: len(piece)]
                fill(host, begin)
                # Without side streams there is no event to wait for before the host writes this memory again.
                piece.copy_(host, non_blocking=has_side_streams(piece.device))
                buffer.copied = record_event(piece.device)

    def store(self, source: Tensor, drain: Callable[[Tensor, int], None]) -> None:
        """Copy from memory of a device; `drain` reads the host's bytes, which belong at an offset."""
        for begin, piece in _pieces(source):
            with self._buffer() as buffer:
                host = buffer.memory(piece.device)[: len(piece)]
                host.copy_(piece, non_blocking=True)
                finish_queued(piece.device)
                drain(host, begin)

    @contextmanager
    def _buffer(self) -> Iterator[_StagingBuffer]:
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)


def _pieces(memory: Tensor) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, len(memory), STAGING_BYTES):
        yield begin, memory[begin : begin + STAGING_BYTES]


@final
class _StagingBuffer:
    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self.copied: torch.Event | None = None
        """The end of the device's copy from this memory."""

    def memory(self, device: torch.device) -> Tensor:
        """Memory that the host may write; pinned if the device reads such memory."""
        if self._memory is None:
            pinned = reads_pinned_memory([device])
            self._memory = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=pinned)
        copied, self.copied = self.copied, None
        if copied is not None:
            copied.synchronize()
        return self._memory
