"""One mini-batch on its way through all partitions: inputs, outputs, what is saved for backward, gradients.

Workers and the caller share this object without a lock: each entry has one writer, and every reader first waits for the
writer's action.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gpipe_cli.accelerator.streams import NO_STREAMS, StreamSet
from gpipe_cli.pipeline.boundary import Gradients, GradSink, PartitionInput
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import MiniBatch, Value, gather
from gpipe_cli.pipeline.module_state import (
    NO_PARAMETERS,
    NOTHING_SHARED,
    BufferState,
    ModuleParameters,
    SharedState,
)
from gpipe_cli.pipeline.split_backward import SplitBackward
from gpipe_cli.pipeline.tied import TiedParameters, Untied, sum_present
from gpipe_cli.pytree import Template, unflatten

MicroBatchLoss = Callable[[Value, MicroBatch], Tensor]
"""Runs after the last layer in a step."""


class ForwardTask(NamedTuple):
    """One micro-batch at one partition."""

    batch: MiniBatch
    micro_batch: MicroBatch
    checkpointed: bool
    loss: MicroBatchLoss | None
    """In the last partition of a step."""
    untied: Sequence[Untied]
    """One per layer of the partition."""
    holders: Mapping[Tensor, Sequence[int]]
    """The positions of the layers that hold each parameter of the pipe."""


@final
@dataclass(slots=True)
class SavedForBackward:
    """What the forward of one micro-batch leaves for its backward: a graph, or what recompute needs to build it."""

    task: ForwardTask
    sink: GradSink
    sizes: tuple[int, ...] = ()
    """The number of tensors in each input."""
    roots: tuple[GradientEdge | None, ...] = ()
    node_numbers: tuple[int, ...] = ()
    """The number of the next autograd node before the first layer and after each layer."""
    has_hooks: bool = False
    """Whether the graph may have hooks."""
    inputs: tuple[PartitionInput, ...] | None = None
    """The inputs to recompute from; None if the forward kept its graph."""
    fetch_inputs: tuple[Callable[[], PartitionInput] | None, ...] = ()
    """For each offloaded input, the function that brings it back; the input has no tensors until then."""
    versions: tuple[list[list[int]], list[int]] = ([], [])
    """Version counters of the inputs and of the parameters."""
    writes_input: bool = False
    parameters: ModuleParameters = NO_PARAMETERS
    """The parameters that a checkpointed forward used."""
    buffers: BufferState | None = None
    """The buffers before a checkpointed forward."""
    outputs: tuple[tuple[Any, ...], ...] = ()
    """What a checkpointed forward sent, to which the outputs of recompute are compared."""
    split: SplitBackward | None = None
    """Set between the two halves of a split backward."""

    @property
    def has_backward(self) -> bool:
        """Whether a gradient of the output leads to anything: not before the first trained layer."""
        return self.inputs is not None or any(root is not None for root in self.roots)

    def offload(self, offload: Callable[[PartitionInput], Callable[[], PartitionInput] | None]) -> None:
        """Hand the inputs of a checkpointed forward to `offload`, which may decline with None."""
        if self.inputs is not None:
            self.fetch_inputs = tuple(offload(input) for input in self.inputs)
            self.inputs = tuple(
                input if fetch is None else input._replace(tensors=())
                for input, fetch in zip(self.inputs, self.fetch_inputs, strict=True)
            )

    def fetched_inputs(self) -> tuple[PartitionInput, ...]:
        assert self.inputs is not None, "only a checkpointed forward can be recomputed"
        if not self.fetch_inputs:
            return self.inputs
        return tuple(
            input if fetch is None else fetch()
            for input, fetch in zip(self.inputs, self.fetch_inputs, strict=True)
        )


logger = logging.getLogger("gpipe_cli.pipeline")


@final
@dataclass(slots=True)
class BatchState:
    batch: MiniBatch
    inputs: list[PartitionInput]
    tied: TiedParameters
    untied: list[list[tuple[Untied, ...]]]
    """By partition and layer; one such list for all micro-batches, or one for each."""
    checkpointed_counts: Sequence[int]
    """By partition: micro-batches before this one are checkpointed."""
    loss: MicroBatchLoss | None = None
    loss_modules: Sequence[nn.Module] = ()
    """The modules that the loss calls, and no layer."""
    shared: SharedState = NOTHING_SHARED
    """What several partitions hold."""
    streams: StreamSet = NO_STREAMS
    """The caller's, of the accelerators in use: workers use them too."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The caller's context variables in the forward."""
    saved: dict[tuple[int, int], SavedForBackward] = field(default_factory=dict)
    """By partition and micro-batch; `release` frees it after the backward."""
    outputs: dict[int, PartitionInput] = field(default_factory=dict)
    output_gradients: list[Gradients] = field(default_factory=list)
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    failure: BaseException | None = None
    """The first failure, where torch's schedule would wrap it in an error of its own."""

    def release(self, partition: int, micro_batch: int, *, keep_graph: bool) -> None:
        """Free the activations of a micro-batch; with `keep_graph`, only a graph that recompute can build again."""
        if not keep_graph:
            del self.saved[partition, micro_batch]
        elif self.saved[partition, micro_batch].inputs is not None:
            self.saved[partition, micro_batch].roots = ()

    @classmethod
    def of(
        cls,
        batch: MiniBatch,
        lengths: Sequence[int],
        tied: TiedParameters,
        checkpointed_counts: Sequence[int],
        loss: StepLoss | None,
        *,
        shared: SharedState = NOTHING_SHARED,
        streams: StreamSet = NO_STREAMS,
    ) -> BatchState:
        """lengths: the number of layers in each partition."""
        inputs = [PartitionInput.of_pipe(tensors, batch.template) for tensors in batch.inputs]
        # A hook on a tied parameter runs per micro-batch of a step, so each needs gradients of its own.
        sets = len(batch.micro_batches) if loss is not None and tied.any_hooks else 1
        untied = []
        for _ in range(sets):
            layers = iter(tied.untied(tracked=batch.state.grad))
            untied.append([tuple(islice(layers, length)) for length in lengths])
        weighted, modules = (None, ()) if loss is None else (loss.weighted, loss.modules)
        return cls(batch, inputs, tied, untied, checkpointed_counts, weighted, modules, shared, streams)

    def forward_task(self, partition: int, micro_batch: int) -> ForwardTask:
        """The task of a forward that is about to run."""
        untied = self.untied[micro_batch % len(self.untied)]  # one set for all micro-batches, or one for each
        checkpoint_stop = self.checkpointed_counts[partition]
        checkpointed = micro_batch < checkpoint_stop
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "Micro-batch %d (partition %d): checkpoint_stop=%d, using_checkpointing=%s",
                micro_batch,
                partition,
                checkpoint_stop,
                checkpointed,
            )
        return ForwardTask(
            self.batch,
            self.batch.micro_batches[micro_batch],
            checkpointed,
            self.loss if partition == len(untied) - 1 else None,
            untied[partition],
            self.tied.holders,
        )

    def gradients_of_output(self, micro_batch: int) -> Gradients:
        """Where backward begins: with the caller's gradients, or with 1 for the loss of a step."""
        if self.loss is None:
            return self.output_gradients[micro_batch]
        return tuple(torch.ones_like(loss) for loss in self.outputs[micro_batch].tensors if loss is not None)

    def output_parts(self) -> list[tuple[Sequence[Tensor], Template]]:
        """The output of each micro-batch as tensors and template."""
        outputs = [self.outputs[index] for index in range(len(self.batch.micro_batches))]
        return [(output.present, output.template) for output in outputs]

    def joined_output(self) -> Value:
        """The output of the whole mini-batch, attached to no graph but that of the layers."""
        tensors, template = gather(self.output_parts())
        return unflatten(template, tensors)

    def joined_input_gradients(self) -> Gradients:
        """The gradients of the whole input; None for a tensor to which no micro-batch sent any."""
        pieces = [self.input_gradients.pop(index) for index in range(len(self.batch.micro_batches))]
        gradients = zip(*pieces, strict=True)
        tensors = zip(*self.batch.inputs, strict=True)
        return tuple(
            sum_present(column) if place in self.batch.whole else _join(column, parts)
            for place, (column, parts) in enumerate(zip(gradients, tensors, strict=True))
        )

    def untied_by_layer(self) -> list[list[Untied]]:
        """For every layer of the pipe; one such list for all micro-batches, or one for each."""
        return [list(chain.from_iterable(by_partition)) for by_partition in self.untied]


def _join(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> Tensor | None:
    if all(gradient is None for gradient in gradients):
        return None
    filled = [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(gradients, tensors, strict=True)
    ]
    return filled[0] if len(filled) == 1 else torch.cat(filled)
