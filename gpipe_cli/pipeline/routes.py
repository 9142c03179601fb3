"""The ways between partitions: one queue per border and direction, one per skip and direction.

Decides how a partition's input is put together and its output handed out, and the same for gradients. On
each way micro-batches go in ascending order, so nothing needs a label. Knows nothing of which worker does
what when.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, final

from torch import Tensor

from gpipe_cli.pipeline.boundary import Gradients, Parcel
from gpipe_cli.pipeline.flight import Flight
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.skips import refuse_written, skip_version
from gpipe_cli.pipeline.transfer import Shipment, ship
from gpipe_cli.skip.name import SkipName

__all__ = ["Routes", "WayClosed"]


@final
class WayClosed(Exception):
    """What was waited for will not come: another worker failed."""


@final
class _Way:
    """A queue that can be closed while others wait on it."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def get(self) -> Any:
        item = self._queue.get()
        if item is None:
            raise WayClosed
        return item

    def close(self) -> None:
        self._queue.put(None)


@final
class Routes:
    """All ways of one walk, between the partitions and to the flight's own input and output."""

    def __init__(self, partitions: Sequence[Partition], flight: Flight) -> None:
        self._partitions = partitions
        self._flight = flight
        self._last = len(partitions) - 1
        self._forward = [_Way() for _ in partitions]
        self._backward = [_Way() for _ in partitions]
        skips = [route.name for partition in partitions for route in partition.sends]
        self._skips: dict[SkipName, _Way] = {name: _Way() for name in skips}
        self._skip_gradients: dict[SkipName, _Way] = {name: _Way() for name in skips}

    def close(self) -> None:
        """Wake up whoever waits; each worker waits on one way at a time."""
        for way in (*self._forward, *self._backward, *self._skips.values(), *self._skip_gradients.values()):
            way.close()

    def receive(self, partition: Partition, micro_batch: int) -> Parcel:
        """What `partition` works on: the value of the one before it, then the skips it pops."""
        if partition.index == 0:
            parcel = self._flight.inputs[micro_batch]
        else:
            parcel = _unpack(self._forward[partition.index].get())
        if not partition.receives:
            return parcel
        skips = [self._receive_skip(route.name) for route in partition.receives]
        return Parcel(
            (*parcel.tensors, *(skip.tensors[0] for skip in skips)),
            (*parcel.needs_grad, *(need for skip in skips for need in skip.needs_grad)),
            parcel.single,
        )

    def _receive_skip(self, name: SkipName) -> Parcel:
        parcel, shipment, version = self._skips[name].get()
        refuse_written(name, parcel.tensors[0], version)
        return _unpack((parcel, shipment))

    def send(self, partition: Partition, micro_batch: int, output: Parcel) -> None:
        """Skips first: once the next partition has the value, it may write it in place."""
        count = len(output.tensors) - len(partition.sends)
        for place, route in enumerate(partition.sends, start=count):
            skip = _part(output, slice(place, place + 1))
            device = self._partitions[route.partition].device
            self._skips[route.name].put((skip, ship(skip.tensors, device), skip_version(skip.tensors[0])))
        value = output if not partition.sends else _part(output, slice(count))
        if partition.index == self._last:
            self._flight.outputs[micro_batch] = value
        else:
            device = self._partitions[partition.index + 1].device
            self._forward[partition.index + 1].put((value, ship(value.tensors, device)))

    def receive_gradients(self, partition: Partition, micro_batch: int) -> Gradients:
        """One per tensor that `partition` sent, in that order."""
        if partition.index == self._last:
            gradients = self._flight.gradients_of_output(micro_batch)
        else:
            gradients = self._backward[partition.index].get().receive()
        if not partition.sends:
            return gradients
        skips: list[Shipment] = [self._skip_gradients[route.name].get() for route in partition.sends]
        return (*gradients, *(tensor for skip in skips for tensor in skip.receive()))

    def send_gradients(self, partition: Partition, micro_batch: int, gradients: Gradients) -> None:
        count = len(gradients) - len(partition.receives)
        if partition.index == 0:
            self._flight.input_gradients[micro_batch] = gradients[:count]
        else:
            device = self._partitions[partition.index - 1].device
            self._backward[partition.index - 1].put(ship(gradients[:count], device))
        for route, gradient in zip(partition.receives, gradients[count:], strict=True):
            device = self._partitions[route.partition].device
            self._skip_gradients[route.name].put(ship((gradient,), device))


def _unpack(message: tuple[Parcel, Shipment]) -> Parcel:
    parcel, shipment = message
    tensors: tuple[Tensor | None, ...] = shipment.receive()
    return parcel if tensors is parcel.tensors else parcel._replace(tensors=tensors)


def _part(parcel: Parcel, place: slice) -> Parcel:
    return Parcel(parcel.tensors[place], parcel.needs_grad[place], parcel.single)
