"""Copies of tensors between devices, without the host waiting for any.

A copy runs on side streams of both devices; the stream that uses the tensors waits for an event. Between equal devices
nothing is copied.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class DeviceCopy(NamedTuple):
    """Tensors on the destination device, and the event after which their memory is filled."""

    tensors: tuple[Tensor | None, ...]
    arrived: torch.cuda.Event | None = None

    def receive(self) -> tuple[Tensor | None, ...]:
        """Called by the thread that uses the tensors: its current stream waits for the copy."""
        if self.arrived is not None:
            present = [tensor for tensor in self.tensors if tensor is not None and tensor.is_cuda]
            for device in {tensor.device for tensor in present}:
                torch.cuda.current_stream(device).wait_event(self.arrived)
            for tensor in present:
                # The allocator must not reuse memory of the copy stream while this stream still reads it.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.tensors


def start_copy(tensors: tuple[Tensor | None, ...], destination: torch.device) -> DeviceCopy:
    """Start to copy `tensors` to `destination`, after what the calling thread has queued on its streams."""
    for tensor in tensors:
        if tensor is not None and tensor.device != destination:
            break
    else:
        return DeviceCopy(tensors)
    sources = {tensor.device for tensor in tensors if tensor is not None} - {destination}
    if not uses_cuda([destination, *sources]):
        return DeviceCopy(tuple(_moved(tensor, destination) for tensor in tensors))
    return _copy_on_side_streams(tensors, sources, destination)


def _copy_on_side_streams(
    tensors: tuple[Tensor | None, ...], sources: set[torch.device], destination: torch.device
) -> DeviceCopy:
    # torch copies on the current stream of the source and makes that of the destination wait. Both must be side
    # streams, or the copy would delay the source's next micro-batch.
    streams = {device: _copy_stream(device) for device in (*sources, destination) if device.type == "cuda"}
    with contextlib.ExitStack() as entered:
        for device, stream in streams.items():
            if device != destination:
                stream.wait_stream(torch.cuda.current_stream(device))
            entered.enter_context(torch.cuda.stream(stream))
        moved = tuple(_moved(tensor, destination) for tensor in tensors)
    for tensor in tensors:
        if tensor is not None and tensor.device in streams:
            # The sender may drop the tensor while the copy still reads it.
            tensor.record_stream(streams[tensor.device])
    # Everything up to here is only queued: the stream that uses the tensors waits for this event.
    arrived = streams[destination if destination in streams else next(iter(streams))].record_event()
    if destination.type == "cuda":
        return DeviceCopy(moved, arrived)
    # The host reads the copy next, and no stream can make it wait.
    arrived.synchronize()
    return DeviceCopy(moved)


def uses_cuda(devices: Sequence[torch.device]) -> bool:
    return any(device.type == "cuda" for device in devices)


def _moved(tensor: Tensor | None, destination: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(destination, non_blocking=True)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
