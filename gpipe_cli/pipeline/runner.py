"""Takes mini-batches through the partitions for a pipe: the frame around the executor.

Decides what a forward and a step consist of, and what happens when layers turn out to hang together across
partitions. Knows nothing of nn.Module's face.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar, final

import torch

from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm
from gpipe_cli.pipeline.boundary import Parcel
from gpipe_cli.pipeline.bridge import bridge, joined_input_gradients
from gpipe_cli.pipeline.entangled import Entangled
from gpipe_cli.pipeline.executor import Executor
from gpipe_cli.pipeline.flight import Flight
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import Value, gather
from gpipe_cli.pipeline.minibatch import MiniBatch, committed
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.pytree import unflatten
from gpipe_cli.pipeline.tied import NO_ALIASES, TiedParameters
from gpipe_cli.pipeline.visit import Head

__all__ = ["Runner"]

Result = TypeVar("Result")


@final
class Runner:
    def __init__(
        self,
        partitions: Sequence[Partition],
        executor: Executor,
        batch_norms: Sequence[DeferredBatchNorm],
        *,
        whole: bool = False,
    ) -> None:
        """whole: leave the graph of a forward to autograd, which then allows a second derivative."""
        self._partitions = partitions
        self.partitions = len(partitions)
        self._layers: list[Layer] = [layer for partition in partitions for layer in partition.layers]
        self._batch_norms = batch_norms
        self._whole = whole
        self._attached = False
        self.executor = executor

    def forward(self, batch: MiniBatch, checkpoint_stops: Sequence[int]) -> Value:
        """The joined output, attached to the input and the parameters for `loss.backward()`."""

        def fly(attached: bool) -> Value:
            flight = self._flight(batch, checkpoint_stops, None, attached)
            with committed(self._batch_norms):
                self.executor.forward(flight)
            if attached:
                return joined(flight)
            flight.count_writes()
            return bridge(flight, self.executor.backward)

        return fly(True) if self._whole else self._attached_if_needed(fly, checkpoint_stops)

    def step(
        self, batch: MiniBatch, make_loss: Callable[[], StepLoss], checkpoint_stops: Sequence[int]
    ) -> StepLoss:
        """Forward and backward; gives the loss that was used."""

        def fly(attached: bool) -> StepLoss:
            loss = make_loss()
            flight = self._flight(batch, checkpoint_stops, loss.weighted, attached)
            with committed(self._batch_norms):
                if attached:
                    self.executor.forward(flight)
                    _backward_attached(flight)
                else:
                    self.executor.step(flight)
            for aliases in flight.aliases_by_layer:
                flight.tied.add_up(aliases)
            if not attached:
                flight.count_writes()
                _give_to_inputs(flight)
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
        tied = TiedParameters([layer.module for layer in self._layers])
        if attached:
            inputs = [Parcel(tensors, (), batch.template, len(tensors)) for tensors in batch.inputs]
        else:
            inputs = [Parcel.of(tensors, batch.template) for tensors in batch.inputs]
        untied = attached or not batch.state.grad
        sets = len(batch.micro_batches) if head is not None and tied.any_hooks else 1
        aliases = []
        for _ in range(sets):
            rest = iter([NO_ALIASES] * len(self._layers) if untied else tied.aliases())
            aliases.append([tuple(islice(rest, len(partition.layers))) for partition in self._partitions])
        return Flight(batch, inputs, tied, aliases, checkpoint_stops, head, attached)


def joined(flight: Flight) -> Value:
    """The output of all micro-batches, whose graphs are whole."""
    tensors, template = gather(flight.output_parts())
    return unflatten(template, tensors)


def _backward_attached(flight: Flight) -> None:
    for piece in flight.micro_batches:
        (loss,) = flight.outputs[piece.index].tensors
        if loss is not None and loss.requires_grad:
            with flight.batch.state.without_autocast():
                torch.autograd.backward(loss)


def _give_to_inputs(flight: Flight) -> None:
    """A step's input may require grad like any tensor that something is computed from."""
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(flight.batch.tensors, joined_input_gradients(flight), strict=True)
        if tensor.requires_grad and gradient is not None
    ]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients)
