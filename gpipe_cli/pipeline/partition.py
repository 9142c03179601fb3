"""One partition: consecutive layers, run forward, recomputed and run backward for one micro-batch at a time.

Decides what is kept between forward and backward. What its layers do besides computing (write their input,
change buffers, need grad) is learnt from the first micro-batch in each mode. Knows nothing of threads,
queues or order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gpipe_cli.pipeline.boundary import ANCHOR, Gradients, Mailbox, Parcel, enter, roots_of
from gpipe_cli.pipeline.buffers import (
    Buffer,
    SavedBuffer,
    all_buffers,
    changed,
    restore,
    save,
    swapped_in,
)
from gpipe_cli.pipeline.context import MicroBatch, Running
from gpipe_cli.pipeline.culprit import failed_in_backward
from gpipe_cli.pipeline.entangled import Watch
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.microbatch import Value, check, tensors_of
from gpipe_cli.pipeline.minibatch import MiniBatch
from gpipe_cli.pipeline.skips import PartitionSkips
from gpipe_cli.pipeline.split_backward import SplitBackward
from gpipe_cli.pipeline.tied import NO_ALIASES, Aliases
from gpipe_cli.skip.layout import SkipRoute
from gpipe_cli.skip.tracker import use_skip_tracker
from gpipe_cli.torch_internals.engine import run_backward
from gpipe_cli.torch_internals.graph_progress import next_number
from gpipe_cli.torch_internals.keyed_random import KeyedRandom
from gpipe_cli.torch_internals.tensor_version import version_of

__all__ = ["Head", "Kept", "Partition", "Visit"]

Head = Callable[[Value, MicroBatch, KeyedRandom], Tensor]
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


@final
@dataclass(slots=True)
class Kept:
    """What a visit leaves for its backward: a graph, or what is needed to make it again."""

    visit: Visit
    mailbox: Mailbox
    roots: tuple[GradientEdge | None, ...] = ()
    marks: tuple[int, ...] = ()
    """Which nodes of the graph each layer made: see `culprit`."""
    parcel: Parcel | None = None
    """The input of a checkpointed visit; None for one whose graph was kept from the beginning."""
    bring_back: Callable[[], Parcel] | None = None
    """Gives the input where it was put away meanwhile; `parcel` has no tensors until then."""
    writes_input: bool = False
    buffers: tuple[SavedBuffer, ...] = ()
    split: SplitBackward | None = None
    """Between the two halves of a split backward."""

    def put_away(self, keep: Callable[[Parcel], Callable[[], Parcel] | None]) -> None:
        """Let somebody else keep the input, if there is one to be kept."""
        if self.parcel is not None:
            self.bring_back = keep(self.parcel)
            if self.bring_back is not None:
                self.parcel = self.parcel._replace(tensors=())


class _Ran(NamedTuple):
    """What the layers gave."""

    tensors: tuple[Tensor | None, ...]
    """Of the value, then the skips that leave."""
    single: bool
    """Whether the value is a bare tensor or a tuple."""
    marks: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Habits:
    """What the layers do besides computing, in one mode."""

    outputs_need_grad: tuple[bool, ...]
    writes_input: bool
    changes: tuple[Buffer, ...]


@final
@dataclass(slots=True)
class Partition:
    index: int
    layers: tuple[Layer, ...]
    device: torch.device
    receives: tuple[SkipRoute, ...] = ()
    sends: tuple[SkipRoute, ...] = ()
    others: Sequence[nn.Module] = ()
    """The layers of all other partitions: their tensors may only come through a boundary."""
    running: Layer | str = "its input"
    """For whoever has to say where an error happened."""
    _random: KeyedRandom = field(default_factory=KeyedRandom)
    _mode: tuple[Any, ...] = ()
    _habits: dict[tuple[Any, ...], Habits] = field(default_factory=dict)
    _before: tuple[SavedBuffer, ...] = ()
    _quiet: bool = False
    """Whether no layer draws, as far as is known."""

    def begin(self) -> None:
        """Look once per mini-batch at what decides how the layers behave."""
        self._before = ()
        self._quiet = all(layer.draws_nothing for layer in self.layers)
        self._mode = (
            tuple(layer.module.training for layer in self.layers),
            tuple(leaf.requires_grad for layer in self.layers for leaf in layer.module.parameters()),
        )

    def forward(self, parcel: Parcel, visit: Visit) -> tuple[Parcel, Kept | None]:
        if visit.attached:
            ran = self._run(parcel.tensors, parcel.single, visit)
            return Parcel(ran.tensors, (), ran.single), None
        mode = (*self._mode, parcel.needs_grad, visit.batch.state.grad)
        habits = self._habits.get(mode)
        if habits is None:
            return self._forward_learning(parcel, visit, mode)
        if visit.checkpointed and any(habits.outputs_need_grad):
            return self._forward_checkpointed(parcel, visit, habits)
        mailbox = Mailbox(parcel.needs_grad)
        ran = self._run(enter(parcel, mailbox), parcel.single, visit)
        return Parcel.of(ran.tensors, ran.single), Kept(visit, mailbox, roots_of(ran.tensors), ran.marks)

    def _forward_learning(self, parcel: Parcel, visit: Visit, mode: tuple[Any, ...]) -> tuple[Parcel, Kept]:
        """As if not checkpointed, to see what happens; a checkpointed visit then drops its graph."""
        before = save(all_buffers([layer.module for layer in self.layers]))
        self._before = self._before or before
        mailbox = Mailbox(parcel.needs_grad)
        given = parcel.cloned() if visit.checkpointed else parcel
        versions = _versions(given)
        watch = Watch(mailbox, [layer.module for layer in self.layers], self.others)
        with torch.set_grad_enabled(visit.batch.state.grad):
            ran = self._run(
                enter(given, mailbox), parcel.single, visit, checkpointing=visit.checkpointed, watch=watch
            )
        output = Parcel.of(ran.tensors, ran.single)
        habits = Habits(output.needs_grad, versions != _versions(given), changed(before))
        self._habits[mode] = habits
        if visit.checkpointed and any(habits.outputs_need_grad):
            buffers = tuple(item for item in before if item.buffer in habits.changes)
            return output, Kept(
                visit,
                mailbox,
                parcel=parcel,
                writes_input=habits.writes_input,
                buffers=buffers,
            )
        return output, Kept(visit, mailbox, roots_of(ran.tensors), ran.marks)

    def _forward_checkpointed(self, parcel: Parcel, visit: Visit, habits: Habits) -> tuple[Parcel, Kept]:
        buffers = save(habits.changes)
        given = parcel.cloned() if habits.writes_input else parcel
        versions = _versions(parcel)
        with torch.no_grad():
            ran = self._run(given.tensors, parcel.single, visit, checkpointing=True)
        if versions != _versions(parcel):
            raise RuntimeError(
                f"partition {self.index} wrote its input in place, which it did not do when it ran first, so "
                "it cannot be recomputed. Use checkpoint='never' or a layer that does not write its input"
            )
        output = Parcel.of(ran.tensors, ran.single)._replace(needs_grad=habits.outputs_need_grad)
        return output, Kept(
            visit,
            Mailbox(parcel.needs_grad),
            parcel=parcel,
            writes_input=habits.writes_input,
            buffers=buffers,
        )

    def recompute(self, kept: Kept) -> None:
        """Make the graph that a checkpointed visit did not keep."""
        assert kept.parcel is not None, "only a checkpointed visit can be recomputed"
        parcel = kept.parcel if kept.bring_back is None else kept.bring_back()
        # A second backward, or another partition, may need the input as it is.
        entered = enter(parcel.cloned() if kept.writes_input else parcel, kept.mailbox)
        with torch.enable_grad(), swapped_in(kept.buffers):
            ran = self._run(entered, parcel.single, kept.visit, recomputing=True)
        kept.roots, kept.marks = roots_of(ran.tensors), ran.marks

    def backward(
        self, kept: Kept, gradients: Gradients, *, keep_graph: bool, parameters: bool = True
    ) -> Gradients:
        """The gradients of what entered; those of `parameters`, if wanted, are added to theirs."""
        pairs = _pairs(kept, gradients)
        if pairs and (parameters or kept.mailbox.expects_any):
            roots, root_gradients = zip(*pairs, strict=True)
            with kept.mailbox, kept.visit.batch.state.without_autocast():
                run_backward(
                    roots,
                    root_gradients,
                    keep_graph=keep_graph,
                    inputs=() if parameters else (ANCHOR,),
                )
        return kept.mailbox.take()

    def backward_input(self, kept: Kept, gradients: Gradients, *, keep_graph: bool) -> Gradients:
        """The half of a backward that the partition before waits for, or all of it if it cannot be split."""
        split = SplitBackward(_pairs(kept, gradients), kept.mailbox)
        if not split.possible:
            return self.backward(kept, gradients, keep_graph=keep_graph)
        with kept.visit.batch.state.without_autocast():
            split.run_input_half()
        kept.split = split
        return kept.mailbox.take()

    def backward_weights(self, kept: Kept, *, keep_graph: bool) -> None:
        """The other half, if it is still to be done."""
        split, kept.split = kept.split, None
        if split is not None:
            with kept.visit.batch.state.without_autocast():
                split.run_weight_half(keep_graph=keep_graph)

    def whereabouts(self) -> str:
        """What runs, in words."""
        return f"layer {self.running!r}" if isinstance(self.running, Layer) else self.running

    def whereabouts_in_backward(self, kept: Kept, error: BaseException) -> str:
        return failed_in_backward(self.layers, kept.roots, kept.marks, error)

    def undo(self) -> None:
        """Forget what was learnt, and give buffers the values they had before this mini-batch."""
        restore(self._before)
        self._before = ()
        self._habits.clear()

    def _run(
        self,
        tensors: tuple[Tensor | None, ...],
        single: bool,
        visit: Visit,
        *,
        checkpointing: bool = False,
        recomputing: bool = False,
        watch: Watch | None = None,
    ) -> _Ran:
        """The layers in turn, and the loss after the last one."""
        count = len(tensors) - len(self.receives)
        value: Any = tensors[0] if single else tensors[:count]
        skips = PartitionSkips(self.receives, tensors[count:], self.sends)
        micro_batch, key = visit.micro_batch, visit.batch.key
        marks = [next_number()]
        with (
            Running(
                micro_batch, checkpointing=checkpointing, recomputing=recomputing, where=self.whereabouts
            ),
            use_skip_tracker(skips),
        ):
            if self._quiet and watch is None and visit.aliases.count(NO_ALIASES) == len(self.layers):
                # Nothing but the layers themselves: for small ones every line here counts.
                for layer in self.layers:
                    self.running = layer
                    value = layer.module(value)
                    marks.append(next_number())
            else:
                for layer, aliases in zip(self.layers, visit.aliases, strict=True):
                    self.running = layer
                    with aliases:
                        value = layer.run(value, key, micro_batch.index, self._random)
                    marks.append(next_number())
                    if watch is not None:
                        watch.look(layer, tensors_of(value) if isinstance(value, Tensor | tuple) else ())
            check(value)
            if visit.head is not None:
                self.running = "the loss function"
                value = visit.head(value, micro_batch, self._random)
                marks.append(next_number())
            self.running = "its input"
        return _Ran((*tensors_of(value), *skips.sent()), isinstance(value, Tensor), tuple(marks))


def _pairs(kept: Kept, gradients: Gradients) -> list[tuple[GradientEdge, Tensor]]:
    """Where backward begins, and with what: only where there is a graph and a gradient."""
    return [
        (root, gradient)
        for root, gradient in zip(kept.roots, gradients, strict=True)
        if root is not None and gradient is not None
    ]


def _versions(parcel: Parcel) -> list[int]:
    return [version_of(tensor) for tensor in parcel.tensors if tensor is not None]
