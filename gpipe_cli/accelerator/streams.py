"""Streams and events of an accelerator of any kind. A CPU has none: what it is asked to run has run on return."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from gpipe_cli.accelerator.devices import is_accelerator


def current_stream(device: torch.device) -> torch.Stream:
    """The calling thread's stream of an accelerator."""
    return torch.accelerator.current_stream(device)


def set_current_device(device: torch.device) -> None:
    """Make an accelerator the one that the calling thread's `device="cuda"` means; a CPU changes nothing."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until the accelerators among `devices` have run everything that any thread has queued."""
    for device in {device for device in devices if is_accelerator(device)}:
        torch.accelerator.synchronize(device)


def median_seconds(
    work: Callable[[], object], devices: Collection[torch.device], *, repeats: int = 5
) -> float:
    """The time of `work` by the host's clock, until the devices have run it; the first call does not count."""
    work()
    synchronize(devices)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        synchronize(devices)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@functools.cache
def has_side_streams(device: torch.device) -> bool:
    """Whether the device can run work beside its default stream. MPS cannot: torch raises when asked for a stream."""
    if not is_accelerator(device):
        return False
    try:
        torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def record_timing_event(stream: torch.Stream) -> torch.Event:
    """An event for `elapsed_time`, after what is queued on the stream; only events of one device can be compared."""
    event = torch.Event(stream.device, enable_timing=True)
    event.record(stream)
    return event


def record_event(device: torch.device) -> torch.Event | None:
    """The end of what the calling thread has queued; None where nothing can run beside it or before its end."""
    return current_stream(device).record_event() if has_side_streams(device) else None


def finish_queued(device: torch.device) -> None:
    """Wait on the host until the device has run what the calling thread has queued on its stream."""
    if has_side_streams(device):
        current_stream(device).synchronize()
    elif is_accelerator(device):
        torch.accelerator.synchronize(device)


def wait_for_event(device: torch.device, event: torch.Event | None) -> None:
    """Let the calling thread's stream wait for the event; the host does not wait."""
    if event is not None:
        current_stream(device).wait_event(event)


def keep_alive(tensor: Tensor) -> None:
    """Once the tensor is freed, the allocator reuses its memory only after what the thread's stream has queued."""
    if has_side_streams(tensor.device):
        tensor.record_stream(current_stream(tensor.device))


@final
class SideStream:
    """A stream of a device for work next to what its other streams run; without such streams, work simply runs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device) if has_side_streams(device) else None

    @contextmanager
    def entered(self, *after: torch.Event | None) -> Iterator[None]:
        """What the block queues runs on this stream, after the events."""
        if self._stream is None:
            yield
            return
        with self._stream:
            for event in after:
                if event is not None:
                    self._stream.wait_event(event)
            yield

    def keep_alive(self, tensor: Tensor) -> None:
        """Once the tensor is freed, the allocator reuses its memory only after what this stream has queued."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
