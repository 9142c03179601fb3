"""The streams of a thread, for other threads that work for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import final

import torch

from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.accelerator.streams import current_stream, has_side_streams, set_current_device

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
