"""Streams and events of an accelerator of any kind, and those of a thread for other threads that work for it.

A CPU has none: what it is asked to run has run on return.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
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


_NO_CHANGE = contextlib.nullcontext()


@final
@dataclass(frozen=True, slots=True)
class StreamSet:
    """One stream for each of some accelerators, and the index of the device that is current with them.

    torch keeps a current device, and a current stream of every device, for each thread. Threads that work for a caller
    use the caller's streams: what they queue comes after what the caller queued before its call, and before what it
    queues later, and the caching allocator sees one owner of all memory.
    """

    streams: tuple[torch.Stream, ...] = ()
    device_index: int | None = None
    """None without any accelerator."""

    @classmethod
    def current(cls, devices: Iterable[torch.device]) -> StreamSet:
        """The calling thread's current device, and its streams of the accelerators among `devices`."""
        present = [device for device in dict.fromkeys(devices) if is_accelerator(device)]
        if not present:
            return NO_STREAMS
        streams = [current_stream(device) for device in present if has_side_streams(device)]
        return cls(tuple(streams), torch.accelerator.current_device_index())

    def entered(self, device: torch.device | None = None) -> AbstractContextManager[object]:
        """Context manager: the thread uses these streams; `device`, if an accelerator, is its current device."""
        return _NO_CHANGE if self.device_index is None else self._entered(device)

    @contextmanager
    def _entered(self, device: torch.device | None) -> Iterator[None]:
        before = StreamSet(
            tuple([current_stream(stream.device) for stream in self.streams]),
            torch.accelerator.current_device_index(),
        )
        self._make_current()
        try:
            if device is not None:
                set_current_device(device)
            yield
        finally:
            before._make_current()

    def _make_current(self) -> None:
        for stream in self.streams:
            torch.accelerator.set_stream(stream)
        assert self.device_index is not None, "a set with streams has a device"
        torch.accelerator.set_device_index(self.device_index)  # `set_stream` has changed it

    @contextmanager
    def entered_in_backward(self) -> Iterator[None]:
        """Context manager for the backward of an autograd function whose forward used these streams.

        Autograd orders the gradients that a node receives and returns with the node's own stream, that of its first
        output. It makes this stream current; for other devices, the streams of its thread are current. So the set's
        streams wait for those here, and those for the set's streams at the end.
        """
        if not self.streams:
            yield
            return
        around = [current_stream(stream.device) for stream in self.streams]
        node_stream = torch.accelerator.current_stream()
        for stream, other in zip(self.streams, around, strict=True):
            _wait(stream, {other, node_stream})
        try:
            with self.entered():
                yield
        finally:
            for stream, other in zip(self.streams, around, strict=True):
                _wait(other, {stream})
            _wait(node_stream, self.streams)


NO_STREAMS = StreamSet()


def _wait(stream: torch.Stream, others: Iterable[torch.Stream]) -> None:
    for other in others:
        if other != stream:
            stream.wait_stream(other)
