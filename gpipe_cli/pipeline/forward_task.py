"""The task of a partition for one micro-batch, what it saves for backward, and what it learnt about its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gpipe_cli.pipeline.aliasing import Alias
from gpipe_cli.pipeline.boundary import GradSink, PartitionInput
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.microbatch import MiniBatch, Value
from gpipe_cli.pipeline.module_state import NO_TENSORS, Buffer, ModuleTensors, SavedBuffer
from gpipe_cli.pipeline.partition_backward import SplitBackward
from gpipe_cli.pipeline.tied import Untied

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
    whole_graph: bool
    """Whether boundaries detach nothing, so that one autograd graph spans all partitions."""
    written_copies: set[int]
    """Storages of which earlier partitions wrote a copy, so that no other partition sees the write."""
    written_inputs: set[int]
    """Places of the pipe's input tensors that layers write in place."""


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
    inputs: tuple[PartitionInput, ...] | None = None
    """The inputs to recompute from; None if the forward kept its graph."""
    fetch_inputs: tuple[Callable[[], PartitionInput] | None, ...] = ()
    """For each offloaded input, the function that brings it back; the input has no tensors until then."""
    input_is_private: bool = False
    """Whether nothing outside the partition can have written the inputs; otherwise recompute compares `versions`."""
    versions: tuple[list[list[int]], int] = ([], 0)
    """Version counters of the inputs, and the sum of those of parameters and buffers."""
    holds_caller_memory: bool = False
    """Whether backward reads memory of the tensors that the caller passed in."""
    writes_input: bool = False
    tensors: ModuleTensors = NO_TENSORS
    """The parameters and buffers that a checkpointed forward used."""
    buffers: tuple[SavedBuffer, ...] = ()
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


@final
@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What a partition's layers do besides computing, learnt from the first micro-batch in each mode."""

    needs_grad: tuple[tuple[bool, ...], ...]
    """For each output, which tensors take part in backward."""
    aliases: tuple[Mapping[int, Alias], ...]
    writes_input: bool
    changed_buffers: tuple[Buffer, ...]
    """Recompute must see these as they were before the forward."""
    written_buffers: tuple[Buffer, ...]
    """Autograd counts writes to these, so a graph must not hold the buffer itself."""
    input_is_caller_memory: bool
    """Whether the inputs share memory with the tensors that the caller passed in."""
    graph_saves_caller_memory: bool
    """Whether the graph saved such memory."""
    written_inputs: frozenset[int]
    """Places of the caller's tensors that the layers write in place."""
    tracks_grad: bool
    """Whether any output takes part in backward."""
