"""One micro-batch at one partition: what the partition is told, what it keeps, and what it learnt of its layers.

Decides nothing; it is what a partition and those who run it hand to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gpipe_cli.pipeline.aliasing import Alias
from gpipe_cli.pipeline.boundary import Mailbox, Parcel
from gpipe_cli.pipeline.buffers import Buffer, SavedBuffer
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.leaves import NO_TENSORS, ModuleTensors
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pipeline.minibatch import MiniBatch
from gpipe_cli.pipeline.pytree import Template
from gpipe_cli.pipeline.split_backward import SplitBackward
from gpipe_cli.pipeline.tied import Aliases

__all__ = ["Habits", "Head", "Kept", "Ran", "Visit"]

Head = Callable[[Value, MicroBatch], Tensor]
"""What follows the last layer in a step: the loss."""


class Visit(NamedTuple):
    """One micro-batch at one partition."""

    batch: MiniBatch
    micro_batch: MicroBatch
    checkpointed: bool
    head: Head | None
    aliases: Sequence[Aliases]
    """One per layer of the partition."""
    attached: bool
    """Whether nothing is cut at boundaries: the graph stays whole and backward is the caller's."""
    written: set[int]
    """The memory that partitions before wrote copies of, so that nobody else sees the write."""
    caller_written: set[int]
    """The places of the pipe's input tensors that layers write."""


@final
@dataclass(slots=True)
class Kept:
    """What a visit leaves for its backward: a graph, or what is needed to make it again."""

    visit: Visit
    mailbox: Mailbox
    sizes: tuple[int, ...] = ()
    """The number of tensors in each parcel that entered."""
    roots: tuple[GradientEdge | None, ...] = ()
    marks: tuple[int, ...] = ()
    """Which nodes of the graph each layer made: see `culprit`."""
    parcels: tuple[Parcel, ...] | None = None
    """The input of a checkpointed visit; None for one whose graph was kept from the beginning."""
    bring_back: tuple[Callable[[], Parcel] | None, ...] = ()
    """For each parcel that was put away meanwhile, what gives it back; it has no tensors until then."""
    input_is_private: bool = False
    """Whether nobody else can have written the input since: else `versions` tells."""
    versions: tuple[list[list[int]], int] = ([], 0)
    """Of the input, and of parameters and buffers."""
    holds_caller: bool = False
    """Whether backward needs the caller's tensors to be as they were."""
    writes_input: bool = False
    tensors: ModuleTensors = NO_TENSORS
    """The parameters and buffers that the forward of a checkpointed visit used."""
    buffers: tuple[SavedBuffer, ...] = ()
    split: SplitBackward | None = None
    """Between the two halves of a split backward."""

    def put_away(self, keep: Callable[[Parcel], Callable[[], Parcel] | None]) -> None:
        """Let somebody else keep the input, if there is one to be kept."""
        if self.parcels is not None:
            self.bring_back = tuple(keep(parcel) for parcel in self.parcels)
            self.parcels = tuple(
                parcel if back is None else parcel._replace(tensors=())
                for parcel, back in zip(self.parcels, self.bring_back, strict=True)
            )

    def input(self) -> tuple[Parcel, ...]:
        """The parcels, brought back where they were put away."""
        assert self.parcels is not None, "only a checkpointed visit can be recomputed"
        if not self.bring_back:
            return self.parcels
        return tuple(
            parcel if back is None else back()
            for parcel, back in zip(self.parcels, self.bring_back, strict=True)
        )


class Ran(NamedTuple):
    """What the layers gave."""

    values: tuple[Tensor, ...]
    template: Template
    skips: tuple[Tensor | None, ...]
    """Those that leave."""
    marks: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Habits:
    """What the layers do besides computing, in one mode."""

    needs_grad: tuple[tuple[bool, ...], ...]
    """Of each parcel that leaves, which tensors take part in backward."""
    aliases: tuple[Mapping[int, Alias], ...]
    writes_input: bool
    changes: tuple[Buffer, ...]
    """Recomputation must see these as they were."""
    writes: tuple[Buffer, ...]
    """Buffers whose writes autograd sees, so that a graph must not hold the buffer itself."""
    input_holds_caller: bool
    """Whether what enters is memory of the caller's tensors."""
    graph_holds_caller: bool
    """Whether the graph saved such memory."""
    writes_caller: frozenset[int]
    """The places of the caller's tensors that the layers write."""

    @property
    def tracks_any(self) -> bool:
        return any(any(needed) for needed in self.needs_grad)
