"""A partition as a stage of torch's pipelining.

torch's stage moves tensors between ranks and says when which micro-batch runs forward and backward; the partition does
both as it does under every engine: boundaries, keys, recompute, and its own split of the backward. torch's
split would run a checkpointed forward three times and needs a graph of its own kind; a `dw_builder` replaces it by
ours.

torch counts micro-batches from 0 in each flush and runs them in ascending order, so the stage counts along. The first
stage takes its input from the batch state and the last one stores its output there, because torch would split both,
and only evenly. Tensors are sent in the announced shape: torch would not notice a wrong one.

Tensors arrive with the strides and the alignment that they had: both decide which kernels run, and with them the bits
of results. torch's schedules carry contiguous memory only, and how an output or a gradient lies is known only once it
is computed. So its sender says it in a store, on the host, the first time that a schedule runs; from then on both ends
remember it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not re-exported
from torch.distributed.pipelining import PipelineStage

from gpipe_cli.distributed.boundary_shapes import BoundarySpec, TensorSpec
from gpipe_cli.distributed.gradient_buckets import GradientBuckets
from gpipe_cli.distributed.groups import RankCoords
from gpipe_cli.pipeline.batch_state import BatchState, SavedForBackward
from gpipe_cli.pipeline.boundary import Gradients, PartitionInput
from gpipe_cli.pipeline.failures import add_note, failure_note
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.schedule.action import Action, Kind
from gpipe_cli.torch_internals.tensors import ALIGNMENT

_LOSS = torch.empty((), device="meta", requires_grad=True)
"""The loss, which the last stage returns to torch; torch sends it nowhere, so its shape does not matter in eval."""
Layout = list[int] | None
"""How many elements behind an aligned address a tensor begins, then its strides; None if contiguous and aligned."""


@final
class Stage(PipelineStage):
    def __init__(
        self,
        partition: Partition,
        entering: BoundarySpec,
        leaving: BoundarySpec | None,
        coords: RankCoords,
        store: Store,
        gradient_buckets: GradientBuckets | None,
        *,
        split: Collection[int],
    ) -> None:
        """store: of this schedule; ranks say in it how tensors lie.

        gradient_buckets: None if there are no other replicas to sum gradients with.
        split: the micro-batches of a flush whose backward is split.
        """
        super().__init__(
            nn.Module(),  # torch never calls it: both methods that would are replaced below
            partition.index,
            coords.partitions,
            coords.device,
            input_args=tuple(kind.example() for kind in entering.kinds) if partition.index else (),
            output_args=_LOSS if leaving is None else tuple(kind.example() for kind in leaving.kinds),
            group=coords.pipe,
            dw_builder=self._weight_half if split else None,
        )
        self._partition = partition
        self._entering = entering
        self._leaving = leaving
        self._layouts = BoundaryLayouts(store)
        self._gradient_buckets = gradient_buckets
        self._split = split
        self._running: BatchState | None = None
        self._first = self._next_forward = self._next_backward = 0
        """Micro-batches: the first of the flush, and those whose forward and backward come next."""
        self._half_done: SavedForBackward | None = None
        # Worked out once: for small layers, every line that runs per micro-batch counts.
        place_of = {name: entering.value_count + place for place, name in enumerate(entering.skip_names)}
        self._received = len(entering.kinds)
        self._taken = [
            *range(entering.value_count),
            *(place_of.get(route.name) for route in partition.receives),
        ]
        """For each tensor that the layers take, its place in what is received; None for a skip that is None."""
        kinds = [None if place is None else entering.kinds[place] for place in self._taken]
        self._needs_grad = tuple(kind is not None and kind.needs_grad for kind in kinds)
        self._shared = frozenset(place for place, kind in enumerate(kinds) if kind and kind.is_shared)
        self._sent: list[int] = []
        """For each tensor that is sent on, its place in the output or, behind that, in what is received."""
        self._output_kinds: list[TensorSpec | None] = []
        if leaving is not None:
            own = leaving.value_count
            skips = dict(zip(leaving.skip_names, leaving.kinds[own:], strict=True))
            self._output_kinds = [*leaving.kinds[:own], *(skips.get(route.name) for route in partition.sends)]
            place_of = {name: len(self._output_kinds) + place for name, place in place_of.items()}
            place_of |= {route.name: own + place for place, route in enumerate(partition.sends)}
            self._sent = [*range(own), *map(place_of.__getitem__, leaving.skip_names)]

    def begin(self, state: BatchState, first: int) -> None:
        """The next flush runs this mini-batch from micro-batch `first` on."""
        self._running = state
        self._first = self._next_forward = self._next_backward = first

    def end(self) -> None:
        self._running = self._half_done = None

    def forward_maybe_with_nosync(self, *received: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """The forward of the next micro-batch, for torch: what is sent on, or the loss."""
        micro_batch = self._next_forward
        self._next_forward += 1
        state, index = self._state, self._partition.index
        try:
            with state.batch.state.without_autocast_cache():
                if index:
                    received = self._layouts.unpack(f"values {index} {micro_batch}", received)
                given = self._input(micro_batch, received)
                outputs, saved = self._partition.forward((given,), state.forward_task(index, micro_batch))
                if state.batch.state.grad:
                    state.saved[index, micro_batch] = saved
                return self._pack(micro_batch, outputs, received)
        except BaseException as error:
            self._note(error, Kind.FORWARD, "forward", micro_batch)
            raise

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Gradients, None]:
        """The backward of the next micro-batch, for torch: the gradients of what was received."""
        micro_batch = self._next_backward
        self._next_backward += 1
        state, partition = self._state, self._partition
        saved = state.saved[partition.index, micro_batch]
        phase = "recompute"
        try:
            if saved.inputs is not None:
                with state.batch.state.entered():
                    partition.recompute(saved)
            phase = "backward"
            leaving, passing = self._gradients_of_output(micro_batch, bwd_kwargs["output_grads"])
            with self._completing(micro_batch):
                if micro_batch - self._first in self._split:
                    entering = partition.backward_input(saved, leaving, keep_graph=False)
                    # torch asks for the second half right after the first, so one slot is enough.
                    self._half_done = saved
                else:
                    entering = partition.backward(saved, leaving, keep_graph=False)
        except BaseException as error:
            self._note(error, Kind.BACKWARD, phase, micro_batch)
            raise
        # The graph is freed here, unless the weight half of a split backward still needs it.
        state.release(partition.index, micro_batch, keep_graph=False)
        return self._gradients_of_input(micro_batch, entering, passing), None

    def _weight_half(self) -> Callable[[], None]:
        """The weight half of the backward that has just run, for later: torch's `dw_builder`."""
        saved, self._half_done = self._half_done, None

        def run() -> None:
            if saved is None:
                return
            micro_batch = saved.task.micro_batch.index
            try:
                with self._completing(micro_batch):
                    self._partition.backward_weights(saved, keep_graph=False)
            except BaseException as error:
                self._note(error, Kind.WEIGHT_GRAD, "backward", micro_batch)
                raise

        return run

    @property
    def _state(self) -> BatchState:
        assert self._running is not None, "a flush has begun"
        return self._running

    def _input(self, micro_batch: int, received: Sequence[Tensor]) -> PartitionInput:
        state, entering = self._state, self._entering
        if self._partition.index == 0:
            return state.inputs[micro_batch]
        return PartitionInput(
            tuple([None if place is None else received[place] for place in self._taken]),
            self._needs_grad if state.batch.state.grad else (False,) * len(self._needs_grad),
            entering.template,
            entering.value_count,
            self._shared,
        )

    def _pack(
        self, micro_batch: int, outputs: tuple[PartitionInput, ...], received: Sequence[Tensor]
    ) -> Tensor | tuple[Tensor, ...]:
        """What is sent on. torch treats the output of the last stage as the loss, which is one tensor."""
        if self._leaving is None:
            (self._state.outputs[micro_batch],) = outputs
            return outputs[0].present[0]
        tensors = [tensor for output in outputs for tensor in output.tensors]
        self._check(tensors)
        sent = [(*tensors, *received)[place] for place in self._sent]
        return self._layouts.pack(f"values {self._partition.index + 1} {micro_batch}", sent)

    def _check(self, tensors: Sequence[Tensor | None]) -> None:
        kinds = self._output_kinds
        if len(kinds) == len(tensors) and all(map(_fits, kinds, tensors)):
            return
        given = ", ".join(str(TensorSpec.of(tensor)) for tensor in tensors if tensor is not None)
        expected = ", ".join(str(kind) for kind in kinds if kind is not None)
        raise RuntimeError(
            f"partition {self._partition.index} gave {given} where it was to give {expected}: what crosses "
            "between processes cannot depend on values. Use engine=threads"
        )

    def _gradients_of_output(
        self, micro_batch: int, received: Gradients
    ) -> tuple[Gradients, dict[int | None, Tensor | None]]:
        """The gradients of the layers' output, and by place in what was received those of tensors that only passed."""
        if self._leaving is None:
            return self._state.gradients_of_output(micro_batch), {}
        received = self._layouts.unpack(f"gradients {self._partition.index + 1} {micro_batch}", received)
        count = len(self._output_kinds)
        gradients = dict(zip(self._sent, received, strict=True))
        of_output = tuple([gradients.pop(place, None) for place in range(count)])
        return of_output, {place - count: gradient for place, gradient in gradients.items()}

    def _gradients_of_input(
        self, micro_batch: int, gradients: Gradients, passing: dict[int | None, Tensor | None]
    ) -> Gradients:
        if self._partition.index == 0:
            return ()
        passing.update(zip(self._taken, gradients, strict=True))
        sent = [passing.get(place) for place in range(self._received)]
        return self._layouts.pack(f"gradients {self._partition.index} {micro_batch}", sent)

    def _completing(self, micro_batch: int) -> AbstractContextManager[None]:
        """Backward runs in ascending order of micro-batches, so that of the last one completes the gradients."""
        if self._gradient_buckets is None or micro_batch + 1 < len(self._state.batch.micro_batches):
            return nullcontext()
        return self._gradient_buckets.last_backward()

    def _note(self, error: BaseException, kind: Kind, phase: str, micro_batch: int) -> None:
        """Keep the first error, and say where it came from: torch wraps whatever a stage raises in one of its own."""
        state, partition = self._state, self._partition
        # The first failure wins: later ones follow from it.
        state.failure = state.failure or error
        saved = state.saved.get((partition.index, micro_batch))
        action = Action(kind, partition.index, micro_batch)
        add_note(
            error,
            lambda: failure_note(
                action, phase, partition.locate(phase, saved, error), partition.device, error
            ),
        )


def _fits(kind: TensorSpec | None, tensor: Tensor | None) -> bool:
    if kind is None or tensor is None:
        return kind is None and tensor is None
    return kind.shape == tensor.shape and kind.dtype == tensor.dtype


@final
class BoundaryLayouts:
    """The layouts of one stage. A place names a boundary, what crosses it, and the micro-batch."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, list[Layout]] = {}

    def pack(self, place: str, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Contiguous tensors to send. One that lies otherwise than the first in its place arrives as the first did."""
        layouts = self._known.get(place)
        if layouts is None:
            layouts = self._known[place] = [None if each is None else _layout(each) for each in tensors]
            self._store.set(place, json.dumps(layouts))
        pairs = zip(tensors, layouts, strict=True)
        return tuple([None if tensor is None else _packed(tensor, layout) for tensor, layout in pairs])

    def unpack(self, place: str, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """What was packed, as it lay before; detached."""
        layouts = self._known.get(place)
        if layouts is None:
            layouts = self._known[place] = json.loads(self._store.get(place))
            self._store.delete_key(place)
        pairs = zip(tensors, layouts, strict=True)
        return tuple([None if tensor is None else _unpacked(tensor, layout) for tensor, layout in pairs])


def _layout(tensor: Tensor) -> Layout:
    layout = [tensor.data_ptr() % ALIGNMENT // tensor.itemsize, *tensor.stride()]
    # Not is_contiguous: the strides of dimensions of size 1 tell kernels whether an image is channels_last.
    return None if layout == [0, *torch.empty(tensor.shape, device="meta").stride()] else layout


def _packed(tensor: Tensor, layout: Layout) -> Tensor:
    # No copy if the elements fill their memory, in whichever order.
    return (
        tensor.contiguous() if layout is None else tensor.permute(_order(layout)).contiguous().view_as(tensor)
    )


def _unpacked(tensor: Tensor, layout: Layout) -> Tensor:
    tensor = tensor.detach()
    if layout is None:
        return tensor
    order, strides = _order(layout), layout[1:]
    tensor = tensor.view([tensor.shape[each] for each in order]).permute(
        [*map(order.index, range(len(order)))]
    )
    if layout != [0, *tensor.stride()]:
        # It had gaps, or elements under several names, or began elsewhere: what is before [1] is the offset.
        memory = torch.empty_strided((2, *tensor.shape), layout, dtype=tensor.dtype, device=tensor.device)
        # torch refuses to write an expanded dimension, whose elements are all one.
        first = [slice(None if stride else 1) for stride in strides]
        memory[1, *first].copy_(tensor[*first])
        tensor = memory[1]
    # No view, so that a layer may write it in place as it would write any output.
    return tensor.detach()


def _order(layout: list[int]) -> list[int]:
    """The dimensions from the outermost to the innermost in memory."""
    _, *strides = layout
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
