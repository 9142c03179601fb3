"""Tensors from one device to another. The only file that knows CUDA streams.

Decides on which stream a copy runs and who waits for it: nobody on the host. Between equal devices nothing
happens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Shipment", "ship", "uses_cuda"]


class Shipment(NamedTuple):
    """Tensors on the destination's device, and the event after which they are really there."""

    tensors: tuple[Tensor | None, ...]
    arrived: torch.cuda.Event | None

    def receive(self) -> tuple[Tensor | None, ...]:
        """Called by the thread that goes on with the tensors, on the stream it works on."""
        if self.arrived is not None:
            present = [tensor for tensor in self.tensors if tensor is not None and tensor.is_cuda]
            for device in {tensor.device for tensor in present}:
                torch.cuda.current_stream(device).wait_event(self.arrived)
            for tensor in present:
                # The allocator must not reuse what was made on the copy stream while this one still reads it.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.tensors


def ship(tensors: tuple[Tensor | None, ...], destination: torch.device) -> Shipment:
    """Start the way of `tensors` to `destination`, from the streams the calling thread works on."""
    sources = {tensor.device for tensor in tensors if tensor is not None}
    sources.discard(destination)
    if not sources:
        return Shipment(tensors, None)
    if not uses_cuda([destination, *sources]):
        return Shipment(tuple(_moved(tensor, destination) for tensor in tensors), None)
    return _ship_by_side_streams(tensors, sources, destination)


def _ship_by_side_streams(
    tensors: tuple[Tensor | None, ...], sources: set[torch.device], destination: torch.device
) -> Shipment:
    """torch copies on the source's current stream and lets the destination's wait: both must be side streams,
    or the copy would stand in the way of the source's next micro-batch.
    """
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
    arrived = streams[destination if destination in streams else next(iter(streams))].record_event()
    if destination.type == "cuda":
        return Shipment(moved, arrived)
    # The host reads the copy next, and no stream can make it wait.
    arrived.synchronize()
    return Shipment(moved, None)


def uses_cuda(devices: Sequence[torch.device]) -> bool:
    return any(device.type == "cuda" for device in devices)


def _moved(tensor: Tensor | None, destination: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(destination, non_blocking=True)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
