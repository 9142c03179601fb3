"""One partition: consecutive layers on one device, run forward, recomputed and run backward per micro-batch.

A checkpointed forward runs with grad mode on, like its recompute, so that the layers run the same code in both. What
autograd saves is dropped layer by layer, and the graph at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gpipe_cli.pipeline.batch_state import ForwardTask, SavedForBackward
from gpipe_cli.pipeline.boundary import (
    NO_VALUE,
    Gradients,
    GradSink,
    GraphLeakDetector,
    PartitionInput,
    common_storages,
    enter,
    pack,
    roots_of,
    shared_memory_written,
)
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.layer_loop import BackwardWatch, LayerLoop, LayerOutputs
from gpipe_cli.pipeline.module_state import PartitionState, SharedState, modified_in_place
from gpipe_cli.pipeline.split_backward import SplitBackward
from gpipe_cli.skip.skippable import SkipRoute
from gpipe_cli.torch_internals.autograd import is_stale_view, run_backward
from gpipe_cli.torch_internals.tensors import is_view, storage_of


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
    is_last: bool = True
    shares_modules: bool = False
    """Whether another partition uses some of the same modules: both replace their tensors while they run."""
    sources: tuple[int, ...] = field(init=False)
    """The partitions that send to this one, the preceding one first: it sends the value."""
    destinations: tuple[int, ...] = field(init=False)
    """The partitions that this one sends to, the following one first; after the last partition, the caller."""
    state: PartitionState = field(init=False)
    _loop: LayerLoop = field(init=False)
    _skips_with_value: int = field(init=False)
    """How many skips go to the following partition, with the value."""
    _split: list[SavedForBackward] = field(default_factory=list)
    """The micro-batches whose backward has run its first half only."""

    def __post_init__(self) -> None:
        self.sources = _distinct(self.index - 1, self.receives)
        self.destinations = _distinct(self.index + 1, self.sends)
        self.state = PartitionState(self.layers)
        self._skips_with_value = sum(route.partition == self.index + 1 for route in self.sends)
        self._loop = LayerLoop(self.layers, self.receives, self.sends)

    def begin(self, shared: SharedState, loss_modules: Sequence[nn.Module] = ()) -> None:
        """Look once per mini-batch at what the layers hold. loss_modules: those that the loss calls after them."""
        self.state.begin(shared, loss_modules)
        self._loop.begin()

    def forward(
        self, inputs: tuple[PartitionInput, ...], task: ForwardTask
    ) -> tuple[tuple[PartitionInput, ...], SavedForBackward]:
        """The inputs of the partitions it sends to, and what backward needs."""
        saved = _saved_for_backward(inputs, task)
        if self.index == 0:
            # The caller's: layers may write their input in place, and the caller may write it before backward.
            inputs = tuple(input.copied() for input in inputs)
        if not task.checkpointed:
            with self.state.separate(keeps_graph=task.batch.state.grad):
                return self._run(inputs, task, saved), saved
        versions = self.state.parameters.versions()
        with self.state.repeatable() as buffers:
            # Recompute needs the inputs as they are, and so may that of the preceding partition.
            copied = tuple(input.copied() for input in inputs)
            outputs = self._run(copied, task, saved, checkpointing=True)
        if any(any(output.needs_grad) for output in outputs):
            self.state.refuse_written(self.state.parameters, versions)
            # Dropping the roots frees the graph.
            saved.roots, saved.node_numbers = (), ()
            saved.inputs, saved.buffers, saved.parameters = inputs, buffers, self.state.parameters
            saved.versions = ([input.versions() for input in inputs], saved.parameters.versions().counters)
            saved.outputs = tuple(output.kinds() for output in outputs)
        return outputs, saved

    def _run(
        self,
        inputs: tuple[PartitionInput, ...],
        task: ForwardTask,
        saved: SavedForBackward,
        *,
        checkpointing: bool = False,
        recomputing: bool = False,
    ) -> tuple[PartitionInput, ...]:
        """Run the layers; `saved` remembers their graph and whether they wrote their inputs."""
        versions = [input.versions() for input in inputs]
        # Looking for paths that lead around the boundaries takes time: once per mini-batch.
        looks_for_leaks = task.micro_batch.index == 0 and task.batch.state.grad and not recomputing
        outputs = self._loop.run(
            inputs,
            enter(inputs, saved.sink),
            task,
            checkpointing=checkpointing,
            recomputing=recomputing,
            leak_detector=GraphLeakDetector(saved.sink, task.holders, self.layers)
            if looks_for_leaks
            else None,
        )
        if versions != [input.versions() for input in inputs]:
            saved.writes_input = True
            if self.index == 0:
                _refuse_written_leaves(task.batch.tensors, versions[0], inputs[0].versions())
        return self._pack(outputs, inputs, saved)

    def recompute(self, saved: SavedForBackward) -> None:
        """Run a checkpointed forward again to build the graph that it did not keep."""
        self._check_unchanged(saved)
        assert saved.buffers is not None, "a checkpointed forward saves its buffers"
        inputs = saved.fetched_inputs()
        wrote, versions = saved.writes_input, saved.parameters.versions()
        if wrote:
            # A second backward, or another partition, may need the inputs as they are.
            inputs = tuple(input.copied() for input in inputs)
        saved.writes_input = False
        with torch.enable_grad(), saved.parameters.in_use(), saved.buffers.in_use():
            outputs = self._run(inputs, saved.task, saved, recomputing=True)
            self.state.refuse_written(saved.parameters, versions)
        if saved.writes_input != wrote or saved.outputs != tuple(output.kinds() for output in outputs):
            layers = f"layers {self.layers[0]!r} to {self.layers[-1]!r}" if self.layers else "no layers"
            raise RuntimeError(
                f"partition {self.index} ({layers}) did something else in recompute than in its forward: it returned "
                "other tensors, or wrote its input in only one of them. Make the layers do the same in both, or use "
                "checkpoint='never'"
            )

    def _check_unchanged(self, saved: SavedForBackward) -> None:
        """Compare autograd's version counters: raise if recompute could not repeat the forward, as autograd would."""
        assert saved.inputs is not None, "only a checkpointed forward can be recomputed"
        input_versions, counters = saved.versions
        if not saved.fetch_inputs and input_versions != [input.versions() for input in saved.inputs]:
            raise modified_in_place("its input", self.index)
        if saved.parameters.versions().counters != counters:
            raise modified_in_place("a parameter", self.index)

    def backward(self, saved: SavedForBackward, gradients: Gradients, *, keep_graph: bool) -> Gradients:
        """The gradients of the inputs. Those of parameters are added to `.grad`."""
        pairs = _roots_with_gradients(saved, gradients)
        # Without a pair the loss does not depend on this partition's output: there is nothing to run.
        if pairs:
            roots, root_gradients = zip(*pairs, strict=True)
            with saved.sink, self._loop.keyed_backward(saved), saved.task.batch.state.without_autocast():
                run_backward(roots, root_gradients, keep_graph=keep_graph)
        return saved.sink.take()

    def backward_input(self, saved: SavedForBackward, gradients: Gradients, *, keep_graph: bool) -> Gradients:
        """The half that the preceding partition waits for, or the whole backward if it cannot be split."""
        split = SplitBackward(_roots_with_gradients(saved, gradients), saved.sink)
        self._split = [each for each in self._split if each.task.batch is saved.task.batch]
        # A hook on a tensor between layers would run in both halves.
        if saved.has_hooks or not split.possible:
            # Gradients add up in ascending order of micro-batches, so the halves that earlier ones left come first.
            for earlier in self._split:
                self.backward_weights(earlier, keep_graph=keep_graph)
            return self.backward(saved, gradients, keep_graph=keep_graph)
        with self._loop.keyed_backward(saved, "backward input"), saved.task.batch.state.without_autocast():
            split.run_input_half()
        saved.split = split
        self._split.append(saved)
        return saved.sink.take()

    def backward_weights(self, saved: SavedForBackward, *, keep_graph: bool) -> None:
        """The other half, if `backward_input` left one that has not run."""
        split, saved.split = saved.split, None
        if split is not None:
            self._split = [each for each in self._split if each is not saved]
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

    def _pack(
        self, outputs: LayerOutputs, inputs: Sequence[PartitionInput], saved: SavedForBackward
    ) -> tuple[PartitionInput, ...]:
        """One input for each destination; `saved` remembers where its gradients will arrive."""
        saved.node_numbers, saved.has_hooks = outputs.node_numbers, outputs.registered_hooks
        values, skips, with_value = outputs.values, outputs.skips, self._skips_with_value
        shared, held = self._read_only_storages((*values, *skips) if skips else values, inputs)
        packed, sources = pack(values, outputs.template, skips[:with_value], shared, held)
        if len(self.sends) == with_value:
            saved.roots = roots_of(sources)
            return (packed,)
        all_packed, sources = [packed], list(sources)
        further = zip(self.sends[with_value:], skips[with_value:], strict=True)
        for _, group in groupby(further, key=lambda pair: pair[0].partition):
            packed, skip_sources = pack((), NO_VALUE, [skip for _, skip in group], shared, held)
            all_packed.append(packed)
            sources.extend(skip_sources)
        saved.roots = roots_of(sources)
        return tuple(all_packed)

    def _read_only_storages(
        self, tensors: Sequence[Tensor | None], inputs: Sequence[PartitionInput]
    ) -> tuple[set[int], set[int]]:
        """The storages of tensors that leave the partition which no receiver may write.

        First those that several tensors have in common, then those of the partition's parameters and buffers.
        """
        leaving = [tensor for tensor in tensors if tensor is not None]
        shared = common_storages(leaving)
        if (
            shared
            and not self.is_last
            and any(storage_of(each) in shared and is_stale_view(each) for each in leaving)
        ):
            # Autograd gives such a view its node when it is used next, behind the boundary, and so it adds up the
            # gradients in an order that only an unsplit graph can have.
            raise shared_memory_written(f"partition {self.index}")
        for input in inputs:
            if input.shared:
                shared |= input.shared_storages()
        # What an operator computed has memory of its own; only a leaf or a view may have that of a parameter or buffer.
        held = any(tensor.grad_fn is None or is_view(tensor) for tensor in leaving)
        return shared, self.state.storages() if held else set()


def _saved_for_backward(inputs: tuple[PartitionInput, ...], task: ForwardTask) -> SavedForBackward:
    if len(inputs) == 1:
        return SavedForBackward(task, GradSink(inputs[0].needs_grad), (len(inputs[0].tensors),))
    needs_grad = tuple(chain.from_iterable(input.needs_grad for input in inputs))
    return SavedForBackward(task, GradSink(needs_grad), tuple(len(input.tensors) for input in inputs))


def _refuse_written_leaves(given: Sequence[Tensor], before: Sequence[int], after: Sequence[int]) -> None:
    """Raise, as without a pipe, if layers wrote an input of the caller's that is a leaf and requires grad."""
    for tensor, *versions in zip(given, before, after, strict=True):
        if tensor.is_leaf and tensor.requires_grad and len(set(versions)) > 1:
            raise RuntimeError(
                "a view of a leaf Variable that requires grad is being used in an in-place operation: the first "
                "partition writes the input of the pipe. Pass a clone of the input"
            )


def _roots_with_gradients(saved: SavedForBackward, gradients: Gradients) -> list[tuple[GradientEdge, Tensor]]:
    """Where backward begins: only where there are both a graph and a gradient."""
    return [
        (root, gradient)
        for root, gradient in zip(saved.roots, gradients, strict=True)
        if root is not None and gradient is not None
    ]


def _distinct(neighbour: int, routes: Sequence[SkipRoute]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((neighbour, *(route.partition for route in routes))))
