"""Copies between a tier and a device, next to the work that computes, and what they cost.

On an accelerator copies run on two streams of their own, one per direction, ordered by events: the host waits only
where it reads or writes bytes itself, for files. A thread queues them, because reading and writing a file blocks the
thread that does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gpipe_cli.accelerator.streams import SideStream, finish_queued, record_event, wait_for_event
from gpipe_cli.offload.tiers import Region

Copy = Future[torch.Event | None]
"""A copy that was submitted; its result is the event after which it is done, None where it is done already."""


@final
@dataclass(frozen=True)
class Transfers:
    """What moving slices has cost."""

    moved_bytes: int
    """In both directions."""
    waited_seconds: float
    """By the thread that computes."""

    def since(self, before: Transfers) -> Transfers:
        return Transfers(self.moved_bytes - before.moved_bytes, self.waited_seconds - before.waited_seconds)


@final
class TransferWorker:
    """Runs one copy after another, in the order of submission, so that a read sees what was written before it."""

    def __init__(self, device: torch.device, *, in_background: bool = True) -> None:
        """in_background: copy while the caller computes; otherwise each copy runs in the caller's thread."""
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpipe-offload") if in_background else None
        # Links to a device carry both directions at once: a load does not wait behind the store of another slice.
        self._loading, self._storing = SideStream(device), SideStream(device)
        self._moved_bytes, self._waited_seconds = 0, 0.0

    @property
    def transfers(self) -> Transfers:
        """All of them so far."""
        return Transfers(self._moved_bytes, self._waited_seconds)

    def load(self, region: Region, memory: Tensor, after: Iterable[Copy] = ()) -> Copy:
        """after: the copies out of this memory or into this region that must be done first."""
        return self._submit(self._loading, lambda: region.read(0, memory), len(memory), list(after))

    def store(self, region: Region, memory: Tensor, begin: int = 0) -> Copy:
        """`memory` must neither change nor be freed before a stream that waits for the copy does it."""
        return self._submit(self._storing, lambda: region.write(begin, memory), len(memory), [])

    def load_now(self, region: Region, memory: Tensor) -> None:
        """Read in the calling thread and its stream, without waiting for the copies that were submitted before."""
        region.read(0, memory)
        self._moved_bytes += len(memory)

    def wait(self, copies: Iterable[Copy]) -> None:
        """Let what the calling thread queues from now on see the copies; raises what one of them raised.

        The host waits until they are queued, and the device until they are done.
        """
        began = time.perf_counter()
        try:
            for copy in copies:
                wait_for_event(self._device, copy.result())
        finally:
            self._waited_seconds += time.perf_counter() - began

    def finish(self, copies: Iterable[Copy]) -> None:
        """Wait on the host until the copies are done, to read, write or free their memory."""
        events = [copy.result() for copy in copies]
        for event in events:
            if event is not None:
                event.synchronize()
        if None in events:
            finish_queued(self._device)

    def keep_alive(self, memory: Tensor) -> None:
        """Once the memory is freed, the allocator reuses it only after the copies from and to it."""
        self._loading.keep_alive(memory)
        self._storing.keep_alive(memory)

    def close(self) -> None:
        """End the thread; calling it twice is fine."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _submit(self, stream: SideStream, move: Callable[[], None], nbytes: int, after: list[Copy]) -> Copy:
        # Counted where it is submitted: the copying thread never touches the counters, so they need no lock.
        self._moved_bytes += nbytes
        # Kernels that the computing thread has already launched may still read or write this memory: the copy stream
        # waits for them on the device, and the host thread goes on at once.
        launched = record_event(self._device)

        def copy() -> torch.Event | None:
            # Earlier copies have run in this thread, so their results are there.
            with stream.entered(launched, *(earlier.result() for earlier in after)):
                move()
                return record_event(self._device)

        if self._thread is not None:
            return self._thread.submit(copy)
        began = time.perf_counter()
        done: Copy = Future()
        done.set_result(copy())
        self._waited_seconds += time.perf_counter() - began
        return done
