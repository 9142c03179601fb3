"""One partition: consecutive layers on one device, run forward, recomputed and run backward per micro-batch.

The first micro-batch in each mode shows what the layers do besides computing: whether they write their input, change
buffers, or return tensors that need grad (`LayerTraits`). Later micro-batches use what it showed.
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

from gpipe_cli.pipeline.boundary import (
    NO_VALUE,
    Gradients,
    GradSink,
    GraphLeakDetector,
    PartitionInput,
    enter,
    pack,
    roots_of,
)
from gpipe_cli.pipeline.forward_task import ForwardTask, LayerTraits, SavedForBackward
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.layer_loop import BackwardWatch, LayerLoop, LayerOutputs
from gpipe_cli.pipeline.module_state import (
    BufferCopies,
    ModuleTensors,
    SavedBuffer,
    all_buffers,
    changed_buffers,
    modified_in_place,
    restore_buffers,
    save_buffers,
    use_saved_buffers,
)
from gpipe_cli.pipeline.partition_backward import GradientCollector, SplitBackward
from gpipe_cli.skip.layout import SkipRoute
from gpipe_cli.torch_internals.autograd_engine import run_backward
from gpipe_cli.torch_internals.autograd_graph import saved_behind
from gpipe_cli.torch_internals.tensor_memory import storage_of

_NO_COPIES = contextlib.nullcontext()


@final
@dataclass(slots=True)
class Partition:
    index: int
    layers: tuple[Layer, ...]
    device: torch.device
    receives: tuple[SkipRoute, ...] = ()
    """Skips from the preceding partition first: they arrive with the value."""
    sends: tuple[SkipRoute, ...] = ()
    """Skips to the following partition first."""
    keeps_aliases: bool = False
    """Whether output tensors that share memory still do so in the following partition."""
    others: Sequence[nn.Module] = ()
    """The layers of all other partitions: their tensors may only arrive through a boundary."""
    shares_modules: bool = False
    """Whether another partition uses some of the same modules: both replace their tensors while they run."""
    sources: tuple[int, ...] = field(init=False)
    """The partitions that send to this one, the preceding one first: it sends the value."""
    destinations: tuple[int, ...] = field(init=False)
    """The partitions that this one sends to, the following one first; after the last partition, the caller."""
    _loop: LayerLoop = field(init=False)
    _tensors: ModuleTensors = field(init=False)
    _skips_with_value: int = field(init=False)
    """How many skips go to the following partition, with the value."""
    _all_traits: dict[tuple[Any, ...], dict[tuple[Any, ...], LayerTraits]] = field(default_factory=dict)
    """By training mode and requires_grad of what the layers hold, then by what a task asks for."""
    _traits: dict[tuple[Any, ...], LayerTraits] = field(default_factory=dict)
    """Those that apply to this mini-batch."""
    _buffers_before: tuple[SavedBuffer, ...] = ()

    def __post_init__(self) -> None:
        self.sources = _distinct(self.index - 1, self.receives)
        self.destinations = _distinct(self.index + 1, self.sends)
        self._skips_with_value = sum(route.partition == self.index + 1 for route in self.sends)
        self._loop = LayerLoop(self.layers, self.receives, self.sends)

    def begin(self) -> None:
        """Look once per mini-batch at what decides how the layers behave."""
        self._buffers_before = ()
        self._tensors = ModuleTensors([layer.module for layer in self.layers])
        self._loop.begin()
        requires_grad = tuple([parameter.requires_grad for parameter in self._tensors.parameters])
        self._traits = self._all_traits.setdefault((self._tensors.training, requires_grad), {})

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self._tensors.parameters)

    def forward(
        self, inputs: tuple[PartitionInput, ...], task: ForwardTask
    ) -> tuple[tuple[PartitionInput, ...], SavedForBackward | None]:
        """The inputs of the partitions it sends to, and what backward needs, unless one graph spans all partitions."""
        needs_grad = inputs[0].needs_grad if len(inputs) == 1 else tuple([each.needs_grad for each in inputs])
        # Whatever can change what the layers do must be in the key: `begin` adds training modes and requires_grad.
        traits_key = (needs_grad, task.batch.state.grad, task.whole_graph, task.loss is None)
        traits = self._traits.get(traits_key)
        if traits is None:
            return self._forward_first_time(inputs, task, traits_key)
        if task.checkpointed and traits.tracks_grad:
            return self._forward_checkpointed(inputs, task, traits)
        saved = _saved_for_backward(inputs, task)
        saved.holds_caller_memory = traits.graph_saves_caller_memory
        if traits.written_inputs:
            task.written_inputs.update(traits.written_inputs)
        with BufferCopies(traits.written_buffers) if traits.written_buffers else _NO_COPIES:
            outputs = self._loop.run(inputs, _enter(inputs, saved), task)
        return self._pack(outputs, saved), None if task.whole_graph else saved

    def _forward_first_time(
        self, inputs: tuple[PartitionInput, ...], task: ForwardTask, traits_key: tuple[Any, ...]
    ) -> tuple[tuple[PartitionInput, ...], SavedForBackward | None]:
        """Run with a graph to see what the layers do; a checkpointed task then drops the graph."""
        modules = [layer.module for layer in self.layers]
        buffers = all_buffers(modules)
        before = save_buffers(buffers)
        self._buffers_before = self._buffers_before or before
        saved = _saved_for_backward(inputs, task)
        # Whether the layers write their input is not known yet, so a checkpointed task keeps a copy in any case.
        given, recompute_inputs = self._forward_and_recompute_inputs(inputs, copies=task.checkpointed)
        versions = _versions(given)
        detector = None if task.whole_graph else GraphLeakDetector(saved.sink, modules, self.others)
        with torch.set_grad_enabled(task.batch.state.grad), BufferCopies(buffers) as copies:
            outputs = self._loop.run(
                given, _enter(given, saved), task, checkpointing=task.checkpointed, leak_detector=detector
            )
        written = [before != after for before, after in zip(versions, _versions(given), strict=True)]
        self._note_writes(written, inputs, given, task)
        packed = self._pack(outputs, saved)
        input_is_caller_memory, graph_saves_caller_memory, written_inputs = self._uses_of_caller_memory(
            inputs, written, saved
        )
        traits = LayerTraits(
            needs_grad=tuple(output.needs_grad for output in packed),
            aliases=tuple(output.aliases for output in packed),
            writes_input=any(written),
            changed_buffers=changed_buffers(before, copies.written),
            written_buffers=copies.written,
            input_is_caller_memory=input_is_caller_memory,
            graph_saves_caller_memory=graph_saves_caller_memory,
            written_inputs=written_inputs,
            tracks_grad=any(any(output.needs_grad) for output in packed),
        )
        self._traits[traits_key] = traits
        saved.holds_caller_memory = traits.graph_saves_caller_memory
        task.written_inputs.update(traits.written_inputs if given is inputs else ())
        if task.whole_graph:
            return packed, None
        if task.checkpointed and traits.tracks_grad:
            # Dropping the roots frees the graph: from here on this is a checkpointed forward like any other.
            saved.roots, saved.node_numbers = (), ()
            saved.buffers = tuple(item for item in before if item.buffer in traits.changed_buffers)
            self._keep_inputs(saved, recompute_inputs if traits.writes_input else inputs, traits)
        return packed, saved

    def _forward_checkpointed(
        self, inputs: tuple[PartitionInput, ...], task: ForwardTask, traits: LayerTraits
    ) -> tuple[tuple[PartitionInput, ...], SavedForBackward]:
        saved = _saved_for_backward(inputs, task)
        saved.buffers = save_buffers(traits.changed_buffers)
        given, recompute_inputs = self._forward_and_recompute_inputs(inputs, copies=traits.writes_input)
        if self.index == 0:
            task.written_inputs.update(traits.written_inputs)
        versions = _versions(given)
        # In evaluation mode some layers take another path without grad, with other bits than recompute would give.
        with torch.set_grad_enabled(not all(self._tensors.training)):
            entered = _enter(given, saved) if torch.is_grad_enabled() else [each.tensors for each in given]
            outputs = self._loop.run(given, entered, task, checkpointing=True)
        written = [before != after for before, after in zip(versions, _versions(given), strict=True)]
        if any(written) and not traits.writes_input:
            raise RuntimeError(
                f"partition {self.index} wrote its input in place, which it did not do when it ran first, so "
                "it cannot be recomputed. Use checkpoint='never' or a layer that does not write its input"
            )
        self._note_writes(written, inputs, given, task)
        packed = self._pack(outputs, saved)
        if [len(output.tensors) for output in packed] != [len(needed) for needed in traits.needs_grad]:
            raise RuntimeError(
                f"partition {self.index} returned another number of tensors than when it ran first, so it cannot "
                "be recomputed. Use checkpoint='never'"
            )
        saved.roots, saved.node_numbers = (), ()
        self._keep_inputs(saved, recompute_inputs, traits)
        # Without grad, autograd tracked none of the outputs; the receiver must treat them as recompute will.
        return tuple(
            output.as_if_tracked(needed, aliases)
            for output, needed, aliases in zip(packed, traits.needs_grad, traits.aliases, strict=True)
        ), saved

    def _forward_and_recompute_inputs(
        self, inputs: tuple[PartitionInput, ...], *, copies: bool
    ) -> tuple[tuple[PartitionInput, ...], tuple[PartitionInput, ...]]:
        """What the layers receive now, and what recompute will receive.

        Layers that write their input write the caller's tensors, as they would without a pipe, but never those of the
        preceding partition: its own recompute may need them.
        """
        if not copies:
            return inputs, inputs
        copied = tuple(input.cloned() for input in inputs)
        # The first partition must write the caller's own tensors, so its recompute gets the copies.
        return (inputs, copied) if self.index == 0 else (copied, inputs)

    def _uses_of_caller_memory(
        self, inputs: Sequence[PartitionInput], written: Sequence[bool], saved: SavedForBackward
    ) -> tuple[bool, bool, frozenset[int]]:
        """Whether inputs are memory of the caller's tensors, whether the graph saved such, and which are written."""
        places = {storage_of(tensor): place for place, tensor in enumerate(saved.task.batch.tensors)}
        storages = [storage_of(tensor) for input in inputs for tensor in input.present]
        roots = [root.node for root in saved.roots if root is not None]
        written_places = (
            places.get(storage) for storage, wrote in zip(storages, written, strict=True) if wrote
        )
        return (
            any(storage in places for storage in storages),
            any(storage_of(tensor) in places for tensor in saved_behind(roots)),
            frozenset(place for place in written_places if place is not None),
        )

    def _note_writes(
        self,
        written: Sequence[bool],
        inputs: Sequence[PartitionInput],
        given: Sequence[PartitionInput],
        task: ForwardTask,
    ) -> None:
        """Record what the layers wrote in place; raise if it is a leaf of the caller that requires grad."""
        if not any(written):
            return
        tensors = [tensor for input in inputs for tensor in input.present]
        if given is not inputs:
            task.written_copies.update(
                storage_of(tensor) for tensor, wrote in zip(tensors, written, strict=True) if wrote
            )
        if self.index == 0 and any(
            wrote and tensor.requires_grad and tensor.is_leaf
            for tensor, wrote in zip(task.batch.tensors, written, strict=False)
        ):
            raise RuntimeError(
                "a view of a leaf Variable that requires grad is being used in an in-place operation: the first "
                "partition writes the input of the pipe. Pass a clone of the input"
            )

    def _keep_inputs(
        self, saved: SavedForBackward, inputs: tuple[PartitionInput, ...], traits: LayerTraits
    ) -> None:
        saved.inputs = inputs
        saved.tensors = self._tensors
        saved.holds_caller_memory = traits.input_is_caller_memory
        saved.writes_input = traits.writes_input
        saved.input_is_private = traits.writes_input and self.index == 0
        # Modules whose buffers every forward changes are left out: each micro-batch changes their versions.
        changing = {buffer.module for buffer in traits.changed_buffers}
        saved.versions = ([input.versions() for input in inputs], self._tensors.versions(changing))

    def recompute(self, saved: SavedForBackward) -> None:
        """Run a checkpointed forward again to build the graph that it did not keep."""
        changing = {item.buffer.module for item in saved.buffers}
        self._check_unchanged(saved, changing)
        inputs = saved.fetched_inputs()
        if saved.writes_input:
            # A second backward, or another partition, may need the inputs as they are.
            inputs = tuple(input.cloned() for input in inputs)
        with torch.enable_grad(), saved.tensors.restored(changing), use_saved_buffers(saved.buffers):
            outputs = self._loop.run(inputs, enter(inputs, saved.sink), saved.task, recomputing=True)
        self._pack(outputs, saved)

    def _check_unchanged(self, saved: SavedForBackward, changing: set[nn.Module]) -> None:
        """Compare autograd's version counters: raise if recompute could not repeat the forward, as autograd would."""
        assert saved.inputs is not None, "only a checkpointed forward can be recomputed"
        input_versions, module_version = saved.versions
        if not saved.input_is_private and not saved.fetch_inputs:
            for input, versions in zip(saved.inputs, input_versions, strict=True):
                if input.versions() != versions:
                    raise modified_in_place("its input", self.index)
        if saved.tensors.versions(changing) != module_version:
            raise modified_in_place("a parameter or buffer", self.index)

    def backward(
        self,
        saved: SavedForBackward,
        gradients: Gradients,
        *,
        keep_graph: bool,
        collector: GradientCollector | None = None,
    ) -> Gradients:
        """The gradients of the inputs. Those of leaves are added to `.grad`, unless the collector wants them."""
        pairs = _roots_with_gradients(saved, gradients)
        # Without a pair the loss does not depend on this partition's output: there is nothing to run.
        if pairs:
            roots, root_gradients = zip(*pairs, strict=True)
            with saved.sink, self._loop.keyed_backward(saved), saved.task.batch.state.without_autocast():
                if collector is not None:
                    collector.run(roots, root_gradients, keep_graph=keep_graph)
                else:
                    run_backward(roots, root_gradients, keep_graph=keep_graph)
        return saved.sink.take()

    def backward_input(self, saved: SavedForBackward, gradients: Gradients, *, keep_graph: bool) -> Gradients:
        """The half that the preceding partition waits for, or the whole backward if it cannot be split."""
        split = SplitBackward(_roots_with_gradients(saved, gradients), saved.sink)
        if not split.possible:
            return self.backward(saved, gradients, keep_graph=keep_graph)
        with self._loop.keyed_backward(saved, "backward input"), saved.task.batch.state.without_autocast():
            split.run_input_half()
        saved.split = split
        return saved.sink.take()

    def backward_weights(self, saved: SavedForBackward, *, keep_graph: bool) -> None:
        """The other half, if `backward_input` left one."""
        split, saved.split = saved.split, None
        if split is not None:
            with (
                self._loop.keyed_backward(saved, "backward weights"),
                saved.task.batch.state.without_autocast(),
            ):
                split.run_weight_half(keep_graph=keep_graph)

    def watch_backward(self, watch: BackwardWatch) -> None:
        """Run every later backward in a context that `watch` makes."""
        self._loop.backward_watch = watch

    def locate(self, phase: str, saved: SavedForBackward | None, error: BaseException) -> str:
        """Name the layer that raised `error`."""
        return self._loop.locate(phase, saved, error)

    def forget_first_run(self) -> None:
        """Forget the learnt traits, and restore the buffers as they were before this mini-batch."""
        restore_buffers(self._buffers_before)
        self._buffers_before = ()
        self._all_traits.clear()

    def _pack(self, outputs: LayerOutputs, saved: SavedForBackward) -> tuple[PartitionInput, ...]:
        """One input for each destination; `saved` remembers where its gradients will arrive."""
        saved.node_numbers = outputs.node_numbers
        if saved.task.whole_graph:
            tensors = (*outputs.values, *outputs.skips)
            return (PartitionInput(tensors, (), outputs.template, len(outputs.values), len(outputs.skips)),)
        with_value = self._skips_with_value
        packed, sources = pack(
            outputs.values, outputs.template, outputs.skips[:with_value], keep_aliases=self.keeps_aliases
        )
        if len(self.sends) == with_value:
            saved.roots = roots_of(sources)
            return (packed,)
        all_packed, sources = [packed], list(sources)
        further = zip(self.sends[with_value:], outputs.skips[with_value:], strict=True)
        for _, group in groupby(further, key=lambda pair: pair[0].partition):
            packed, skip_sources = pack((), NO_VALUE, [skip for _, skip in group])
            all_packed.append(packed)
            sources.extend(skip_sources)
        saved.roots = roots_of(sources)
        return tuple(all_packed)


def _enter(inputs: tuple[PartitionInput, ...], saved: SavedForBackward) -> Sequence[Sequence[Tensor | None]]:
    return [input.tensors for input in inputs] if saved.task.whole_graph else enter(inputs, saved.sink)


def _saved_for_backward(inputs: tuple[PartitionInput, ...], task: ForwardTask) -> SavedForBackward:
    if len(inputs) == 1:
        return SavedForBackward(task, GradSink(inputs[0].needs_grad), (len(inputs[0].tensors),))
    needs_grad = tuple(chain.from_iterable(input.needs_grad for input in inputs))
    return SavedForBackward(task, GradSink(needs_grad), tuple(len(input.tensors) for input in inputs))


def _roots_with_gradients(saved: SavedForBackward, gradients: Gradients) -> list[tuple[GradientEdge, Tensor]]:
    """Where backward begins: only where there are both a graph and a gradient."""
    return [
        (root, gradient)
        for root, gradient in zip(saved.roots, gradients, strict=True)
        if root is not None and gradient is not None
    ]


def _versions(inputs: Sequence[PartitionInput]) -> list[int]:
    return [version for input in inputs for version in input.versions()]


def _distinct(neighbour: int, routes: Sequence[SkipRoute]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((neighbour, *(route.partition for route in routes))))
