"""Takes mini-batches through the partitions for a pipe: the frame around the executor.

Decides what a forward and a step consist of, and what happens when layers turn out to hang together across
partitions. Knows nothing of nn.Module's face.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import TypeVar, final

import torch
from torch import Tensor

from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm
from gpipe_cli.pipeline.boundary import Gradients, Parcel
from gpipe_cli.pipeline.bridge import bridge, joined_input_gradients
from gpipe_cli.pipeline.entangled import Entangled
from gpipe_cli.pipeline.executor import Executor
from gpipe_cli.pipeline.flight import Flight
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import Value, gather, tensors_of
from gpipe_cli.pipeline.minibatch import MiniBatch, guarded
from gpipe_cli.pipeline.partition import Head, Partition
from gpipe_cli.pipeline.tied import NO_ALIASES, Aliases, TiedParameters

__all__ = ["Runner"]

Result = TypeVar("Result")


@final
class Runner:
    def __init__(
        self,
        partitions: Sequence[Partition],
        executor: Executor,
        tied: TiedParameters,
        batch_norms: Sequence[DeferredBatchNorm],
    ) -> None:
        self._partitions = partitions
        self.partitions = len(partitions)
        self._layers: list[Layer] = [layer for partition in partitions for layer in partition.layers]
        self._devices: list[torch.device] = [partition.device for partition in partitions]
        self._batch_norms = batch_norms
        self._tied = tied
        self._attached = False
        self.executor = executor

    def forward(self, batch: MiniBatch, input: Value, checkpoint_stops: Sequence[int]) -> Value:
        """The joined output, attached to `input` and the parameters for `loss.backward()`."""

        def fly(attached: bool) -> Value:
            flight = self._flight(batch, checkpoint_stops, None, attached)
            with guarded(self._layers, self._devices, self._batch_norms):
                self.executor.forward(flight)
            if attached:
                return gather([flight.outputs[piece.index].value for piece in batch.micro_batches])
            return bridge(flight, tensors_of(input), self._backward)

        return self._attached_if_needed(fly, checkpoint_stops)

    def step(
        self,
        batch: MiniBatch,
        input: Value,
        make_loss: Callable[[], StepLoss],
        checkpoint_stops: Sequence[int],
    ) -> StepLoss:
        """Forward and backward; gives the loss that was used."""

        def fly(attached: bool) -> StepLoss:
            loss = make_loss()
            flight = self._flight(batch, checkpoint_stops, loss.head(batch.key), attached)
            with guarded(self._layers, self._devices, self._batch_norms):
                if attached:
                    self.executor.forward(flight)
                    _backward_attached(flight)
                else:
                    self.executor.step(flight)
            self._tied.add_up(_of_all_layers(flight))
            if not attached:
                _give_to_inputs(flight, tensors_of(input))
            return loss

        return self._attached_if_needed(fly, checkpoint_stops)

    def _attached_if_needed(self, fly: Callable[[bool], Result], checkpoint_stops: Sequence[int]) -> Result:
        """Cut the graph at boundaries, unless layers were seen to pass tensors around them.

        That is seen with the first mini-batch, which is then run once more with the graph left whole.
        Recomputation would lose such gradients all the same: there it stays an error.
        """
        if self._attached and not any(checkpoint_stops):
            return fly(True)
        try:
            return fly(False)
        except Entangled:
            for partition in self._partitions:
                partition.undo()
            if any(checkpoint_stops):
                raise
            self._attached = True
        return fly(True)

    def _flight(
        self, batch: MiniBatch, checkpoint_stops: Sequence[int], head: Head | None, attached: bool
    ) -> Flight:
        pieces = [(tensors_of(piece), isinstance(piece, Tensor)) for piece in batch.inputs]
        if attached:
            inputs = [Parcel(tensors, (), single) for tensors, single in pieces]
            aliases = [NO_ALIASES] * len(self._layers)
        else:
            inputs = [Parcel.of(tensors, single) for tensors, single in pieces]
            aliases = self._tied.aliases()
        rest = iter(aliases)
        by_partition = [tuple(islice(rest, len(partition.layers))) for partition in self._partitions]
        return Flight(batch, inputs, by_partition, checkpoint_stops, head, attached)

    def _backward(
        self, flight: Flight, gradients: list[Gradients], keep_graph: bool, parameters: bool
    ) -> None:
        with guarded(self._layers, self._devices, ()):
            self.executor.backward(flight, gradients, keep_graph=keep_graph, parameters=parameters)
        self._tied.add_up(_of_all_layers(flight))


def _of_all_layers(flight: Flight) -> list[Aliases]:
    return list(chain.from_iterable(flight.aliases))


def _backward_attached(flight: Flight) -> None:
    for piece in flight.micro_batches:
        (loss,) = flight.outputs[piece.index].tensors
        if loss is not None and loss.requires_grad:
            with flight.batch.state.without_autocast():
                torch.autograd.backward(loss)


def _give_to_inputs(flight: Flight, inputs: Sequence[Tensor]) -> None:
    """A step's input may require grad like any tensor that something is computed from."""
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(inputs, joined_input_gradients(flight), strict=True)
        if tensor.requires_grad and gradient is not None
    ]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients)
