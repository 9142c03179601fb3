"""The channels between partitions: one per pair of partitions and direction.

Decides how a partition's input is put together and its output handed out, and the same for gradients. On each channel
micro-batches go in ascending order, so nothing needs a label. Knows nothing of which worker does what when.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from queue import SimpleQueue
from typing import Any, final

from torch import Tensor

from gpipe_cli.pipeline.boundary import Gradients, Parcel
from gpipe_cli.pipeline.flight import Flight
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.skips import refuse_written, skip_version
from gpipe_cli.pipeline.transfer import Shipment, ship
from gpipe_cli.pipeline.visit import Kept

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
    """All channels of one walk, between the partitions and to the flight's own input and output."""

    def __init__(self, partitions: Sequence[Partition], flight: Flight) -> None:
        self._partitions = partitions
        self._flight = flight
        self._last = len(partitions) - 1
        pairs = [
            (partition.index, destination)
            for partition in partitions
            for destination in partition.destinations
            if destination <= self._last
        ]
        self._forward = {pair: _Way() for pair in pairs}
        self._backward = {pair: _Way() for pair in pairs}

    def close(self) -> None:
        """Wake up whoever waits; each worker waits on one channel at a time."""
        for way in (*self._forward.values(), *self._backward.values()):
            way.close()

    def receive(self, partition: Partition, micro_batch: int) -> tuple[Parcel, ...]:
        """What `partition` works on: the value of the one before it, then the skips it pops."""
        if partition.index == 0:
            return (self._flight.inputs[micro_batch],)
        return tuple([self._receive(source, partition.index, micro_batch) for source in partition.sources])

    def _receive(self, source: int, destination: int, micro_batch: int) -> Parcel:
        parcel, shipment, versions = self._forward[source, destination].get()
        if source < destination - 1:
            names = [
                route.name for route in self._partitions[destination].receives if route.partition == source
            ]
            refuse_written(names, parcel.tensors, versions, self._flight.written[micro_batch])
        tensors: tuple[Tensor | None, ...] = shipment.receive()
        assert isinstance(parcel, Parcel), "channels carry parcels forward"
        return parcel if tensors is parcel.tensors else parcel._replace(tensors=tensors)

    def send(self, partition: Partition, micro_batch: int, outputs: tuple[Parcel, ...]) -> None:
        """Skips first: once the next partition has the value, it may write it in place."""
        for destination, parcel in zip(reversed(partition.destinations), reversed(outputs), strict=True):
            if destination > self._last:
                self._flight.outputs[micro_batch] = parcel
                continue
            shipment = ship(parcel.tensors, self._partitions[destination].device)
            # Nobody can write what goes to the next partition before that has it.
            passes_by = destination > partition.index + 1
            versions = [skip_version(tensor) for tensor in parcel.tensors] if passes_by else []
            self._forward[partition.index, destination].put((parcel, shipment, versions))

    def receive_gradients(self, partition: Partition, micro_batch: int) -> Gradients:
        """One per tensor that `partition` sent, in that order."""
        if partition.index == self._last:
            return self._flight.gradients_of_output(micro_batch)
        if len(partition.destinations) == 1:
            return self._receive_gradients(partition.index, partition.index + 1)
        return tuple(
            gradient
            for destination in partition.destinations
            for gradient in self._receive_gradients(partition.index, destination)
        )

    def _receive_gradients(self, source: int, destination: int) -> Gradients:
        shipment: Shipment = self._backward[source, destination].get()
        return shipment.receive()

    def send_gradients(self, partition: Partition, gradients: Gradients, kept: Kept) -> None:
        if partition.index == 0:
            self._flight.input_gradients[kept.visit.micro_batch.index] = gradients
            return
        rest = iter(gradients)
        for source, size in zip(partition.sources, kept.sizes, strict=True):
            shipment = ship(tuple(islice(rest, size)), self._partitions[source].device)
            self._backward[source, partition.index].put(shipment)
