"""One partition: consecutive layers, run forward, recomputed and run backward for one micro-batch at a time.

Decides what is kept between forward and backward. What its layers do besides computing (write their input,
change buffers, need grad) is learnt from the first micro-batch in each mode. Knows nothing of threads,
queues or order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gpipe_cli.pipeline.boundary import NO_VALUE, Gradients, Mailbox, Parcel, enter, pack, roots_of
from gpipe_cli.pipeline.buffers import (
    SavedBuffer,
    WrittenApart,
    all_buffers,
    changed,
    restore,
    save,
    swapped_in,
)
from gpipe_cli.pipeline.entangled import Watch
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.layer_run import LayerRun
from gpipe_cli.pipeline.leaves import Collected, ModuleTensors, modified_in_place
from gpipe_cli.pipeline.split_backward import SplitBackward
from gpipe_cli.pipeline.visit import Habits, Kept, Ran, Visit
from gpipe_cli.skip.layout import SkipRoute
from gpipe_cli.torch_internals.engine import run_backward
from gpipe_cli.torch_internals.graph_progress import saved_behind
from gpipe_cli.torch_internals.storage import storage_of

__all__ = ["Partition"]

_AS_THEY_ARE = contextlib.nullcontext()


@final
@dataclass(slots=True)
class Partition:
    index: int
    layers: tuple[Layer, ...]
    device: torch.device
    receives: tuple[SkipRoute, ...] = ()
    """Those of the partition before first: they come with the value."""
    sends: tuple[SkipRoute, ...] = ()
    """Those to the partition after it first."""
    keeps_aliases: bool = False
    """Whether tensors that share memory still do where its output goes."""
    others: Sequence[nn.Module] = ()
    """The layers of all other partitions: their tensors may only come through a boundary."""
    _run_layers: LayerRun = field(init=False)
    _all_habits: dict[tuple[Any, ...], dict[tuple[Any, ...], Habits]] = field(default_factory=dict)
    """By modes and requires_grad of what the layers hold, and by what a visit asks for."""
    _habits: dict[tuple[Any, ...], Habits] = field(default_factory=dict)
    """Those of this mini-batch."""
    _before: tuple[SavedBuffer, ...] = ()
    _tensors: ModuleTensors = field(init=False)
    sources: tuple[int, ...] = field(init=False)
    """The partitions that send it anything: the one before first, which sends the value."""
    destinations: tuple[int, ...] = field(init=False)
    """The partitions that it sends anything to: the one after it first, or whoever takes the output."""
    _with_value: int = field(init=False)
    """How many skips go to the next partition, with the value."""

    def __post_init__(self) -> None:
        self.sources = _distinct(self.index - 1, self.receives)
        self.destinations = _distinct(self.index + 1, self.sends)
        self._with_value = sum(route.partition == self.index + 1 for route in self.sends)
        self._run_layers = LayerRun(self.layers, self.receives, self.sends)

    def begin(self) -> None:
        """Look once per mini-batch at what decides how the layers behave."""
        self._before = ()
        modules = [layer.module for layer in self.layers]
        self._tensors = ModuleTensors(modules)
        self._run_layers.begin()
        mode = (
            self._tensors.training,
            tuple([parameter.requires_grad for parameter in self._tensors.parameters]),
        )
        self._habits = self._all_habits.setdefault(mode, {})

    def forward(self, parcels: tuple[Parcel, ...], visit: Visit) -> tuple[tuple[Parcel, ...], Kept | None]:
        needs_grad = tuple([parcel.needs_grad for parcel in parcels])
        mode = (needs_grad, visit.batch.state.grad, visit.attached, visit.head is None)
        habits = self._habits.get(mode)
        if habits is None:
            return self._forward_learning(parcels, visit, mode)
        if visit.checkpointed and habits.tracks_any:
            return self._forward_checkpointed(parcels, visit, habits)
        kept = _kept(parcels, visit)
        kept.holds_caller = habits.graph_holds_caller
        if habits.writes_caller:
            visit.caller_written.update(habits.writes_caller)
        with WrittenApart(habits.writes) if habits.writes else _AS_THEY_ARE:
            ran = self._run_layers(parcels, self._enter(parcels, kept), visit)
        return self._outputs(ran, kept), None if visit.attached else kept

    def _forward_learning(
        self, parcels: tuple[Parcel, ...], visit: Visit, mode: tuple[Any, ...]
    ) -> tuple[tuple[Parcel, ...], Kept | None]:
        """As if not checkpointed, to see what happens; a checkpointed visit then drops its graph."""
        modules = [layer.module for layer in self.layers]
        buffers = all_buffers(modules)
        before = save(buffers)
        self._before = self._before or before
        kept = _kept(parcels, visit)
        given, saved = self._given_and_saved(parcels, copies=visit.checkpointed)
        versions = _versions(given)
        watch = None if visit.attached else Watch(kept.mailbox, modules, self.others)
        with torch.set_grad_enabled(visit.batch.state.grad), WrittenApart(buffers) as apart:
            ran = self._run_layers(
                given, self._enter(given, kept), visit, checkpointing=visit.checkpointed, watch=watch
            )
        written = [before != after for before, after in zip(versions, _versions(given), strict=True)]
        self._note_writes(written, parcels, given, visit)
        outputs = self._outputs(ran, kept)
        habits = Habits(
            tuple(parcel.needs_grad for parcel in outputs),
            tuple(parcel.aliases for parcel in outputs),
            any(written),
            changed(before, apart.written),
            apart.written,
            *self._traces_of_caller(parcels, written, kept),
        )
        self._habits[mode] = habits
        kept.holds_caller = habits.graph_holds_caller
        visit.caller_written.update(habits.writes_caller if given is parcels else ())
        if visit.attached:
            return outputs, None
        if visit.checkpointed and habits.tracks_any:
            kept.roots, kept.marks = (), ()
            kept.buffers = tuple(item for item in before if item.buffer in habits.changes)
            self._keep_input(kept, saved if habits.writes_input else parcels, habits)
        return outputs, kept

    def _forward_checkpointed(
        self, parcels: tuple[Parcel, ...], visit: Visit, habits: Habits
    ) -> tuple[tuple[Parcel, ...], Kept]:
        kept = _kept(parcels, visit)
        kept.buffers = save(habits.changes)
        given, saved = self._given_and_saved(parcels, copies=habits.writes_input)
        visit.caller_written.update(habits.writes_caller if self.index == 0 else ())
        versions = _versions(given)
        # Without grad some layers take another path in evaluation mode, to other bits than recomputation will.
        with torch.set_grad_enabled(not all(self._tensors.training)):
            entered = self._enter(given, kept) if torch.is_grad_enabled() else [one.tensors for one in given]
            ran = self._run_layers(given, entered, visit, checkpointing=True)
        written = [before != after for before, after in zip(versions, _versions(given), strict=True)]
        if any(written) and not habits.writes_input:
            raise RuntimeError(
                f"partition {self.index} wrote its input in place, which it did not do when it ran first, so "
                "it cannot be recomputed. Use checkpoint='never' or a layer that does not write its input"
            )
        self._note_writes(written, parcels, given, visit)
        outputs = self._outputs(ran, kept)
        if [len(parcel.tensors) for parcel in outputs] != [len(needed) for needed in habits.needs_grad]:
            raise RuntimeError(
                f"partition {self.index} returned another number of tensors than when it ran first, so it cannot "
                "be recomputed. Use checkpoint='never'"
            )
        kept.roots, kept.marks = (), ()
        self._keep_input(kept, saved, habits)
        return tuple(
            parcel.as_if_tracked(needed, aliases)
            for parcel, needed, aliases in zip(outputs, habits.needs_grad, habits.aliases, strict=True)
        ), kept

    def _given_and_saved(
        self, parcels: tuple[Parcel, ...], *, copies: bool
    ) -> tuple[tuple[Parcel, ...], tuple[Parcel, ...]]:
        """What the layers get, and what recomputation will get.

        Layers that write their input write the caller's tensors, as they would without a pipe, but not those of the
        partition before: it may be recomputed from them.
        """
        if not copies:
            return parcels, parcels
        copied = tuple(parcel.cloned() for parcel in parcels)
        return (parcels, copied) if self.index == 0 else (copied, parcels)

    def _traces_of_caller(
        self, parcels: Sequence[Parcel], written: Sequence[bool], kept: Kept
    ) -> tuple[bool, bool, frozenset[int]]:
        """Whether the input is memory of the caller's tensors, whether the graph saved such, and which are written."""
        places = {storage_of(tensor): place for place, tensor in enumerate(kept.visit.batch.tensors)}
        storages = [storage_of(tensor) for parcel in parcels for tensor in parcel.present]
        roots = [root.node for root in kept.roots if root is not None]
        return (
            any(storage in places for storage in storages),
            any(storage_of(tensor) in places for tensor in saved_behind(roots)),
            frozenset(
                places[storage]
                for storage, wrote in zip(storages, written, strict=True)
                if wrote and storage in places
            ),
        )

    def _note_writes(
        self, written: Sequence[bool], parcels: Sequence[Parcel], given: Sequence[Parcel], visit: Visit
    ) -> None:
        """Of what the layers wrote in place, tell those who would have seen it."""
        if not any(written):
            return
        tensors = [tensor for parcel in parcels for tensor in parcel.present]
        if given is not parcels:
            visit.written.update(
                storage_of(tensor) for tensor, wrote in zip(tensors, written, strict=True) if wrote
            )
        if self.index == 0 and any(
            wrote and tensor.requires_grad and tensor.is_leaf
            for tensor, wrote in zip(visit.batch.tensors, written, strict=False)
        ):
            raise RuntimeError(
                "a view of a leaf Variable that requires grad is being used in an in-place operation: the first "
                "partition writes the input of the pipe. Pass a clone of the input"
            )

    def _keep_input(self, kept: Kept, saved: tuple[Parcel, ...], habits: Habits) -> None:
        kept.parcels = saved
        kept.tensors = self._tensors
        kept.holds_caller = habits.input_holds_caller
        kept.writes_input = habits.writes_input
        kept.input_is_private = habits.writes_input and self.index == 0
        kept.versions = ([parcel.versions() for parcel in saved], self._tensors.versions(_modules(habits)))

    def recompute(self, kept: Kept) -> None:
        """Make the graph that a checkpointed visit did not keep."""
        self._check_unchanged(kept)
        parcels = kept.input()
        if kept.writes_input:
            # A second backward, or another partition, may need the input as it is.
            parcels = tuple(parcel.cloned() for parcel in parcels)
        changes = {item.buffer.module for item in kept.buffers}
        with torch.enable_grad(), kept.tensors.in_place(changes), swapped_in(kept.buffers):
            ran = self._run_layers(parcels, enter(parcels, kept.mailbox), kept.visit, recomputing=True)
        self._outputs(ran, kept)

    def _check_unchanged(self, kept: Kept) -> None:
        """Raise if the forward could not be repeated, as autograd does where it kept the graph."""
        assert kept.parcels is not None, "only a checkpointed visit can be recomputed"
        inputs, leaves = kept.versions
        if not kept.input_is_private and not kept.bring_back:
            for parcel, versions in zip(kept.parcels, inputs, strict=True):
                if parcel.versions() != versions:
                    raise modified_in_place("its input", self.index)
        changes = {item.buffer.module for item in kept.buffers}
        if kept.tensors.versions(changes) != leaves:
            raise modified_in_place("a parameter or buffer", self.index)

    def backward(
        self,
        kept: Kept,
        gradients: Gradients,
        *,
        keep_graph: bool,
        collected: Collected | None = None,
    ) -> Gradients:
        """The gradients of what entered; those of leaves are added to theirs, unless they are `collected`."""
        pairs = _pairs(kept, gradients)
        if pairs:
            roots, root_gradients = zip(*pairs, strict=True)
            with kept.mailbox, self._run_layers.in_backward(kept), kept.visit.batch.state.without_autocast():
                if collected is not None:
                    collected.run(roots, root_gradients, keep_graph=keep_graph)
                else:
                    run_backward(roots, root_gradients, keep_graph=keep_graph)
        return kept.mailbox.take()

    def backward_input(self, kept: Kept, gradients: Gradients, *, keep_graph: bool) -> Gradients:
        """The half of a backward that the partition before waits for, or all of it if it cannot be split."""
        split = SplitBackward(_pairs(kept, gradients), kept.mailbox)
        if not split.possible:
            return self.backward(kept, gradients, keep_graph=keep_graph)
        with self._run_layers.in_backward(kept), kept.visit.batch.state.without_autocast():
            split.run_input_half()
        kept.split = split
        return kept.mailbox.take()

    def backward_weights(self, kept: Kept, *, keep_graph: bool) -> None:
        """The other half, if it is still to be done."""
        split, kept.split = kept.split, None
        if split is not None:
            with self._run_layers.in_backward(kept), kept.visit.batch.state.without_autocast():
                split.run_weight_half(keep_graph=keep_graph)

    def whereabouts(self, phase: str, kept: Kept | None, error: BaseException) -> str:
        """Where `error` was raised, in words."""
        return self._run_layers.whereabouts(phase, kept, error)

    def undo(self) -> None:
        """Forget what was learnt, and give buffers the values they had before this mini-batch."""
        restore(self._before)
        self._before = ()
        self._all_habits.clear()

    def _outputs(self, ran: Ran, kept: Kept) -> tuple[Parcel, ...]:
        """What leaves, by destination; where its gradients arrive is kept."""
        kept.marks = ran.marks
        if kept.visit.attached:
            tensors = (*ran.values, *ran.skips)
            return (Parcel(tensors, (), ran.template, len(ran.values), len(ran.skips)),)
        skips = ran.skips[: self._with_value]
        parcel, sources = pack(ran.values, ran.template, skips, keep_aliases=self.keeps_aliases)
        if len(self.sends) == self._with_value:
            kept.roots = roots_of(sources)
            return (parcel,)
        parcels, sources = [parcel], list(sources)
        rest = zip(self.sends[self._with_value :], ran.skips[self._with_value :], strict=True)
        for _, group in groupby(rest, key=lambda pair: pair[0].partition):
            parcel, of_parcel = pack((), NO_VALUE, [skip for _, skip in group])
            parcels.append(parcel)
            sources.extend(of_parcel)
        kept.roots = roots_of(sources)
        return tuple(parcels)

    def _enter(self, parcels: tuple[Parcel, ...], kept: Kept) -> Sequence[Sequence[Tensor | None]]:
        return [parcel.tensors for parcel in parcels] if kept.visit.attached else enter(parcels, kept.mailbox)


def _kept(parcels: tuple[Parcel, ...], visit: Visit) -> Kept:
    if len(parcels) == 1:
        return Kept(visit, Mailbox(parcels[0].needs_grad), (len(parcels[0].tensors),))
    needs_grad = tuple(chain.from_iterable(parcel.needs_grad for parcel in parcels))
    return Kept(visit, Mailbox(needs_grad), tuple(len(parcel.tensors) for parcel in parcels))


def _pairs(kept: Kept, gradients: Gradients) -> list[tuple[GradientEdge, Tensor]]:
    """Where backward begins, and with what: only where there is a graph and a gradient."""
    return [
        (root, gradient)
        for root, gradient in zip(kept.roots, gradients, strict=True)
        if root is not None and gradient is not None
    ]


def _versions(parcels: Sequence[Parcel]) -> list[int]:
    return [version for parcel in parcels for version in parcel.versions()]


def _modules(habits: Habits) -> set[nn.Module]:
    return {buffer.module for buffer in habits.changes}


def _distinct(neighbour: int, routes: Sequence[SkipRoute]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((neighbour, *(route.partition for route in routes))))
