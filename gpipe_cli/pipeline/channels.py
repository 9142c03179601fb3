"""The channels between partitions: one per pair of partitions and direction.

A channel carries micro-batches in ascending order, because every schedule does, so nothing needs a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from queue import SimpleQueue
from typing import Any, final

from gpipe_cli.accelerator.copies import CopyTime, DeviceCopy, start_copy
from gpipe_cli.accelerator.device_errors import on_device
from gpipe_cli.pipeline.batch_state import BatchState, SavedForBackward
from gpipe_cli.pipeline.boundary import Gradients, PartitionInput
from gpipe_cli.pipeline.partition import Partition


@final
class ChannelClosed(Exception):
    """Another worker failed, so what this one waits for will never arrive."""


@final
class _Channel:
    """A queue that can be closed while a worker waits on it."""

    __slots__ = ("_queue", "put")

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.put = self._queue.put

    def get(self) -> Any:
        item = self._queue.get()
        if item is None:
            raise ChannelClosed
        return item


@final
class Channels:
    """All channels of one pass over the actions, and the way to the pipe's own input and output."""

    def __init__(self, partitions: Sequence[Partition], state: BatchState, *, timed: bool = False) -> None:
        """timed: `send` and `send_gradients` return when copies on side streams begin and end."""
        self._partitions = partitions
        self._state = state
        self._timed = timed
        self._last = len(partitions) - 1
        pairs = [
            (partition.index, destination)
            for partition in partitions
            for destination in partition.destinations
            if destination <= self._last
        ]
        # Fresh channels for every pass: after a failure, items of the failed pass must not reach the next one.
        self._forward = {pair: _Channel() for pair in pairs}
        self._backward = {pair: _Channel() for pair in pairs}

    def close(self) -> None:
        """Wake up every worker that waits. A worker waits on one channel at a time, so one item each is enough."""
        for channel in (*self._forward.values(), *self._backward.values()):
            channel.put(None)

    def receive(self, partition: Partition, micro_batch: int) -> tuple[PartitionInput, ...]:
        """The value of the preceding partition with its skips, then the skips of earlier partitions."""
        if partition.index == 0:
            return (self._state.inputs[micro_batch],)
        return tuple([self._receive(source, partition) for source in partition.sources])

    def _receive(self, source: int, partition: Partition) -> PartitionInput:
        input: PartitionInput
        copy: DeviceCopy
        input, copy = self._forward[source, partition.index].get()
        tensors = copy.receive()
        return input if tensors is input.tensors else input._replace(tensors=tensors)

    def send(
        self, partition: Partition, micro_batch: int, outputs: tuple[PartitionInput, ...]
    ) -> tuple[CopyTime, ...]:
        times: tuple[CopyTime, ...] = ()
        for destination, output in zip(partition.destinations, outputs, strict=True):
            if destination > self._last:
                self._state.outputs[micro_batch] = output
                continue
            copy = self._start_copy(output.tensors, destination)
            times += copy.times
            self._forward[partition.index, destination].put((output, copy))
        return times

    def receive_gradients(self, partition: Partition, micro_batch: int) -> Gradients:
        """One gradient per tensor that `partition` sent, in that order."""
        if partition.index == self._last:
            return self._state.gradients_of_output(micro_batch)
        received: list[Gradients] = [
            self._backward[partition.index, destination].get().receive()
            for destination in partition.destinations
        ]
        return received[0] if len(received) == 1 else tuple(g for gradients in received for g in gradients)

    def send_gradients(
        self, partition: Partition, gradients: Gradients, saved: SavedForBackward
    ) -> tuple[CopyTime, ...]:
        times: tuple[CopyTime, ...] = ()
        if partition.index == 0:
            self._state.input_gradients[saved.task.micro_batch.index] = gradients
            return times
        # The sink holds the gradients of all inputs in one list, in the order of the sources.
        remaining = iter(gradients)
        for source, size in zip(partition.sources, saved.sizes, strict=True):
            copy = self._start_copy(tuple(islice(remaining, size)), source)
            times += copy.times
            self._backward[source, partition.index].put(copy)
        return times

    def _start_copy(self, tensors: Gradients, partition: int) -> DeviceCopy:
        device = self._partitions[partition].device
        try:
            return start_copy(tensors, device, timed=self._timed)
        except BaseException as error:
            # Memory ran out where the copy goes to, not where the running action is.
            error.add_note(f"while copying to partition {partition}{on_device(device, error)}")
            raise
