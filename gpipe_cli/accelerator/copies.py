"""Copies of tensors between devices, without the host waiting for any.

A copy runs on side streams of both devices; the stream that uses the tensors waits for an event. Between equal devices
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gpipe_cli.accelerator.streams import StreamSet, current_stream, has_side_streams, record_timing_event

Tensors: TypeAlias = tuple[Tensor | None, ...]
CopyTime: TypeAlias = tuple[torch.Event, torch.Event]
"""Begin and end."""


class DeviceCopy(NamedTuple):
    """Tensors on the destination device, and the events after which their memory is filled."""

    tensors: Tensors
    arrived: tuple[torch.Event, ...] = ()
    destination: torch.device = torch.device("cpu")
    times: tuple[CopyTime, ...] = ()
    """The events around each copy, if times were asked for and the copies run on side streams."""

    def receive(self) -> Tensors:
        """Called by the thread that uses the tensors: its current stream waits for the copies."""
        if self.arrived:
            self._wait()
        return self.tensors

    def _wait(self) -> None:
        if not has_side_streams(self.destination):
            # The host reads the tensors next, and no stream can wait on its behalf. It waits here and not where the
            # copies start, so that the sender can queue its next micro-batch.
            for event in self.arrived:
                event.synchronize()
            return
        stream = current_stream(self.destination)
        for event in self.arrived:
            stream.wait_event(event)
        for tensor in self.tensors:
            if tensor is not None:
                # The allocator must not reuse memory of the copy stream while this stream still reads it.
                tensor.record_stream(stream)


def start_copy(tensors: Tensors, destination: torch.device, *, timed: bool = False) -> DeviceCopy:
    """Start to copy `tensors` to `destination`, after what the calling thread has queued on its streams."""
    for tensor in tensors:
        if tensor is not None and tensor.device != destination:
            break
    else:
        return DeviceCopy(tensors)
    arrived: list[torch.Event] = []
    times: list[CopyTime] = []
    for source in {tensor.device for tensor in tensors if tensor is not None} - {destination}:
        streams = copy_streams(source, destination)
        if streams:
            tensors = _copy_on_side_streams(tensors, source, destination, streams, times if timed else None)
            # Everything up to here is only queued: the receiver waits for this event.
            arrived.append(streams[-1].record_event())
        else:
            tensors = _moved(tensors, source, destination, non_blocking=False)
    return DeviceCopy(tensors, tuple(arrived), destination, tuple(times))


def wait_for_copies(devices: Iterable[torch.device]) -> None:
    """Let the calling thread's streams wait for all copies from `devices`, so that it may write what was copied."""
    for device in devices:
        for (source, _), streams in list(_copy_streams.items()):
            if source == device and streams and streams[0].device == source:
                current_stream(source).wait_stream(streams[0])


def copy_streams(source: torch.device, destination: torch.device) -> tuple[torch.Stream, ...]:
    """Where copies between two devices run: a stream of the source, then one of the destination.

    A device without side streams has none here. Each pair and direction has its own, so no copy waits for another one
    without need.
    """
    streams = _copy_streams.get((source, destination))
    if streams is None:
        both = tuple(torch.Stream(device) for device in (source, destination) if has_side_streams(device))
        # If two threads come here at once, both use the streams of the first.
        streams = _copy_streams.setdefault((source, destination), both)
    return streams


_copy_streams: dict[tuple[torch.device, torch.device], tuple[torch.Stream, ...]] = {}


def _copy_on_side_streams(
    tensors: Tensors,
    source: torch.device,
    destination: torch.device,
    streams: tuple[torch.Stream, ...],
    times: list[CopyTime] | None,
) -> Tensors:
    """times: gets the time of the copy."""
    outbound = streams[0]
    if outbound.device == source:
        outbound.wait_stream(current_stream(source))
        for tensor in tensors:
            if tensor is not None and tensor.device == source:
                # The sender may drop the tensor while the copy still reads it.
                tensor.record_stream(outbound)
    # torch copies on the current stream of the source and makes that of the destination wait. Both must be side
    # streams, or the copy would delay the next micro-batch of either device.
    begin = None if times is None else record_timing_event(outbound)
    with StreamSet(streams, outbound.device_index).entered():
        moved = _moved(tensors, source, destination, non_blocking=True)
    if times is not None and begin is not None:
        times.append((begin, record_timing_event(outbound)))
    return moved


def _moved(
    tensors: Tensors, source: torch.device, destination: torch.device, *, non_blocking: bool
) -> Tensors:
    return tuple(
        [
            tensor.to(destination, non_blocking=non_blocking)
            if tensor is not None and tensor.device == source
            else tensor
            for tensor in tensors
        ]
    )
