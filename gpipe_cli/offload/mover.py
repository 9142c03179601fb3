"""Bytes between a tier and a device, moved beside the thread that computes.

One job after another, in the order given: what was written is there when it is read. On a CUDA device the copies run
on a stream of their own, after what was begun before them and done when their job is. Counts what was moved and how
long was waited for it. Knows nothing of slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

import torch
from torch import Tensor

from gpipe_cli.offload.tiers import Region

__all__ = ["Mover"]


@final
class Mover:
    def __init__(self, device: torch.device, *, beside: bool = True) -> None:
        """beside: whether moving and computing go on at the same time, or take turns."""
        self._device = device
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix="gpipe-offload") if beside else None
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.moved_bytes = 0
        self.waited_seconds = 0.0

    def load(self, region: Region, memory: Tensor) -> Future[None]:
        return self._submit(lambda: region.read(0, memory), len(memory))

    def store(self, region: Region, memory: Tensor) -> Future[None]:
        return self._submit(lambda: region.write(0, memory), len(memory))

    def put(self, region: Region, begin: int, source: Tensor) -> Future[None]:
        """Part of a region; `source` must not change before it is done."""
        return self._submit(lambda: region.write(begin, source), len(source))

    def wait(self, jobs: Iterable[Future[None]]) -> None:
        """Until they are done; what one of them raised is raised here."""
        began = time.perf_counter()
        try:
            for job in jobs:
                job.result()
        finally:
            self.waited_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Twice is fine."""
        if self._jobs is not None:
            self._jobs.shutdown(cancel_futures=True)

    def _submit(self, move: Callable[[], None], nbytes: int) -> Future[None]:
        self.moved_bytes += nbytes
        # The memory may still be read or written by what the computing thread has begun on the device.
        begun = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

        def job() -> None:
            if self._stream is None:
                move()
                return
            with torch.cuda.stream(self._stream):
                assert begun is not None, "a device with streams has events"
                self._stream.wait_event(begun)
                move()
                self._stream.synchronize()

        if self._jobs is not None:
            return self._jobs.submit(job)
        began = time.perf_counter()
        done: Future[None] = Future()
        job()
        done.set_result(None)
        self.waited_seconds += time.perf_counter() - began
        return done
