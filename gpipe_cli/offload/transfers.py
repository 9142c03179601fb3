"""Copies between a tier and a device, on a thread next to the one that computes, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gpipe_cli.offload.tiers import Region


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
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._moved_bytes, self._waited_seconds = 0, 0.0

    @property
    def transfers(self) -> Transfers:
        """All of them so far."""
        return Transfers(self._moved_bytes, self._waited_seconds)

    def load(self, region: Region, memory: Tensor) -> Future[None]:
        return self._submit(lambda: region.read(0, memory), len(memory))

    def store(self, region: Region, memory: Tensor, begin: int = 0) -> Future[None]:
        """`memory` must not change before the copy is done."""
        return self._submit(lambda: region.write(begin, memory), len(memory))

    def load_now(self, region: Region, memory: Tensor) -> None:
        """Read in the calling thread, without waiting for the copies that were submitted before."""
        region.read(0, memory)
        self._moved_bytes += len(memory)

    def wait(self, copies: Iterable[Future[None]]) -> None:
        """Wait for the copies; raises what one of them raised."""
        began = time.perf_counter()
        try:
            for copy in copies:
                copy.result()
        finally:
            self._waited_seconds += time.perf_counter() - began

    def close(self) -> None:
        """End the thread; calling it twice is fine."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _submit(self, move: Callable[[], None], nbytes: int) -> Future[None]:
        # Counted where it is submitted: the copying thread never touches the counters, so they need no lock.
        self._moved_bytes += nbytes
        # Kernels that the computing thread has already launched may still read or write this memory: the copy stream
        # waits for them on the device, and the host thread goes on at once.
        launched = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

        def copy() -> None:
            if self._stream is None:
                move()
                return
            with torch.cuda.stream(self._stream):
                assert launched is not None, "a device with streams has events"
                self._stream.wait_event(launched)
                move()
                # The future must not complete before the bytes have arrived.
                self._stream.synchronize()

        if self._thread is not None:
            return self._thread.submit(copy)
        began = time.perf_counter()
        done: Future[None] = Future()
        copy()
        done.set_result(None)
        self._waited_seconds += time.perf_counter() - began
        return done
