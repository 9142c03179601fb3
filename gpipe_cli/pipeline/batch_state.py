"""One mini-batch on its way through all partitions: inputs, outputs, what is saved for backward, gradients.

Workers and the caller share this object without a lock: each entry has one writer, and every reader first waits for the
writer's action.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.streams import NO_STREAMS, StreamSet
from gpipe_cli.pipeline.boundary import Gradients, PartitionInput
from gpipe_cli.pipeline.forward_task import ForwardTask, MicroBatchLoss, SavedForBackward
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import MiniBatch, Value, gather
from gpipe_cli.pipeline.module_state import NOTHING_SHARED, SharedState, modified_in_place
from gpipe_cli.pipeline.tied import TiedParameters, Untied, sum_present
from gpipe_cli.pytree import Template, unflatten
from gpipe_cli.torch_internals.tensor_memory import storage_of, version_of

logger = logging.getLogger("gpipe_cli.pipeline")


@final
@dataclass(slots=True)
class BatchState:
    batch: MiniBatch
    inputs: list[PartitionInput]
    tied: TiedParameters
    untied: list[list[tuple[Untied, ...]]]
    """By partition and layer; one such list for all micro-batches, or one for each."""
    checkpoint_stops: Sequence[int]
    """By partition: micro-batches before this one are checkpointed."""
    loss: MicroBatchLoss | None = None
    loss_modules: Sequence[nn.Module] = ()
    """Those that the loss calls, and no layer."""
    shared: SharedState = NOTHING_SHARED
    """What several partitions hold."""
    streams: StreamSet = NO_STREAMS
    """The caller's, of the accelerators in use: workers use them too."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The caller's context variables in the forward."""
    saved: dict[tuple[int, int], SavedForBackward] = field(default_factory=dict)
    """By partition and micro-batch."""
    outputs: dict[int, PartitionInput] = field(default_factory=dict)
    output_gradients: list[Gradients] = field(default_factory=list)
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    written_inputs: set[int] = field(default_factory=set)
    """Places of the input's tensors that layers wrote."""
    input_versions: list[int] = field(default_factory=list)
    """Version counters of the input's tensors after the forward."""
    failure: BaseException | None = None
    """The first failure, where torch's schedule would wrap it in an error of its own."""

    @classmethod
    def of(
        cls,
        batch: MiniBatch,
        lengths: Sequence[int],
        tied: TiedParameters,
        checkpoint_stops: Sequence[int],
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
        return cls(batch, inputs, tied, untied, checkpoint_stops, weighted, modules, shared, streams)

    def forward_task(self, partition: int, micro_batch: int) -> ForwardTask:
        """The task of a forward that is about to run."""
        untied = self.untied[micro_batch % len(self.untied)]  # one set for all micro-batches, or one for each
        checkpoint_stop = self.checkpoint_stops[partition]
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
            self.written_inputs,
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

    def bump_input_versions(self) -> None:
        """Let the version counters of the caller's tensors see what layers wrote: micro-batches have their own."""
        # A graph of the caller's that saved the input must notice that layers wrote it.
        tensors = self.batch.tensors
        torch.autograd.graph.increment_version([tensors[place] for place in self.written_inputs])
        self.input_versions = [version_of(tensor) for tensor in tensors]

    def check_input(self) -> None:
        """Raise if the caller wrote a tensor that backward reads, as autograd does without a pipe."""
        if self.input_versions != [version_of(tensor) for tensor in self.batch.tensors]:
            storages = {storage_of(tensor) for tensor in self.batch.tensors}
            for (partition, _), saved in sorted(self.saved.items(), key=lambda item: item[0]):
                if any(storage_of(tensor) in storages for tensor in saved.memory()):
                    raise modified_in_place("the input of the pipe", partition)


def _join(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> Tensor | None:
    if all(gradient is None for gradient in gradients):
        return None
    filled = [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(gradients, tensors, strict=True)
    ]
    return filled[0] if len(filled) == 1 else torch.cat(filled)
