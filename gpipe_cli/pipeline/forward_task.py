"""The task of a partition for one micro-batch, and what it saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, final

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gpipe_cli.pipeline.boundary import GradSink, PartitionInput
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.microbatch import MiniBatch, Value
from gpipe_cli.pipeline.module_state import NO_PARAMETERS, BufferState, ModuleParameters
from gpipe_cli.pipeline.partition_backward import SplitBackward
from gpipe_cli.pipeline.tied import Untied
from gpipe_cli.torch_internals.autograd_graph import saved_behind

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
    """Those that a checkpointed forward used."""
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

    def memory(self) -> Iterator[Tensor]:
        """The tensors that backward reads."""
        if self.inputs is not None:
            return chain.from_iterable(input.present for input in self.inputs)
        return saved_behind([root.node for root in self.roots if root is not None])

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
