"""A partition as a stage of torch's pipelining.

torch's stage moves tensors between ranks and says when which micro-batch runs forward and backward; the partition does
both as it does under every engine: boundaries, keys, recompute, and its own split of the backward. torch's
split would run a checkpointed forward three times and needs a graph of its own kind; a `dw_builder` replaces it by
ours.

torch counts micro-batches from 0 in each flush and runs them in ascending order, so the stage counts along. The first
stage takes its input from the batch state and the last one stores its output there, because torch would split both,
and only evenly. Tensors are sent contiguous, as gloo requires, and in the announced shape: torch would not notice a
wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from gpipe_cli.distributed.boundary_shapes import NO_TENSOR, BoundarySpec, TensorSpec, shared_places
from gpipe_cli.distributed.gradient_buckets import GradientBuckets
from gpipe_cli.distributed.groups import RankCoords
from gpipe_cli.pipeline.batch_state import BatchState
from gpipe_cli.pipeline.boundary import Gradients, PartitionInput
from gpipe_cli.pipeline.failures import add_note, failure_note
from gpipe_cli.pipeline.forward_task import SavedForBackward
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.schedule.action import Action, Kind
from gpipe_cli.skip.namespace import SkipName

_LOSS = torch.empty((), device="meta", requires_grad=True)
"""The loss, which the last stage returns to torch; torch sends it nowhere, so its shape does not matter in eval."""


@final
class Stage(PipelineStage):
    def __init__(
        self,
        partition: Partition,
        entering: BoundarySpec,
        leaving: BoundarySpec | None,
        coords: RankCoords,
        gradient_buckets: GradientBuckets | None,
        *,
        split: Collection[int],
    ) -> None:
        """gradient_buckets: None if there are no other replicas to sum gradients with.

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
        self._gradient_buckets = gradient_buckets
        self._split = split
        self._running: BatchState | None = None
        self._first = self._next_forward = self._next_backward = 0
        """Micro-batches: the first of the flush, and those whose forward and backward come next."""
        self._half_done: SavedForBackward | None = None
        # Worked out once: for small layers, every line that runs per micro-batch counts.
        self._carries_skips = bool(
            entering.skips or partition.receives or partition.sends or (leaving is not None and leaving.skips)
        )
        self._entering_needs = tuple(kind.needs_grad for kind in entering.value)
        self._leaving_kinds = () if leaving is None else leaving.kinds

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
                given, passing = self._unpack(micro_batch, received)
                output, saved = self._partition.forward((given,), state.forward_task(index, micro_batch))
                if state.batch.state.grad:
                    state.saved[index, micro_batch] = saved
                return self._pack(micro_batch, output, passing)
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
            gradients = (
                state.gradients_of_output(micro_batch)
                if self._leaving is None
                else bwd_kwargs["output_grads"]
            )
            leaving, passing = self._gradients_of_output(gradients)
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
        del state.saved[partition.index, micro_batch]
        return self._gradients_of_input(entering, passing), None

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

    def _unpack(
        self, micro_batch: int, received: tuple[Tensor, ...]
    ) -> tuple[PartitionInput, dict[SkipName, Tensor]]:
        """The input of the layers, and the skips that only pass through this stage."""
        if self._partition.index == 0:
            return self._state.inputs[micro_batch], {}
        boundary = self._entering
        count = len(boundary.value)
        grad = self._state.batch.state.grad
        # Leaves of a graph of our own: torch's backward ends at this stage's node, and ours starts inside it.
        tensors = [tensor.detach() for tensor in received]
        if not self._carries_skips:
            needed = self._entering_needs if grad else (False,) * count
            return PartitionInput(
                tuple(tensors), needed, boundary.template, count, shared_places(boundary.value)
            ), {}
        kinds = dict(boundary.skips)
        skips = dict(zip(boundary.skip_names, tensors[count:], strict=True))
        names = [route.name for route in self._partition.receives]
        popped = [skips.pop(name, None) for name in names]
        entering = [*boundary.value, *(kinds.get(name, NO_TENSOR) for name in names)]
        return PartitionInput(
            (*tensors[:count], *popped),
            tuple(kind.needs_grad and grad for kind in entering),
            boundary.template,
            count,
            shared_places(entering),
        ), skips

    def _pack(
        self, micro_batch: int, outputs: tuple[PartitionInput, ...], passing: dict[SkipName, Tensor]
    ) -> Tensor | tuple[Tensor, ...]:
        """What is sent on. torch treats the output of the last stage as the loss, which is one tensor."""
        if self._leaving is None:
            (self._state.outputs[micro_batch],) = outputs
            return outputs[0].present[0]
        tensors: Iterable[Tensor | None] = outputs[0].tensors
        if self._carries_skips:
            count = outputs[0].value_count
            sent = [tensor for output in outputs for tensor in output.tensors]
            skips: dict[SkipName, Tensor | None] = dict(passing)
            names = (route.name for route in self._partition.sends)
            skips.update(zip(names, sent[count:], strict=True))
            tensors = (*sent[:count], *(skips[name] for name in sorted(skips)))
        present = tuple([tensor.contiguous() for tensor in tensors if tensor is not None])
        self._check(present)
        return present

    def _check(self, tensors: tuple[Tensor, ...]) -> None:
        kinds = self._leaving_kinds
        if len(kinds) != len(tensors) or not all(map(TensorSpec.fits, kinds, tensors)):
            given = ", ".join(str(TensorSpec.of(tensor)) for tensor in tensors)
            expected = ", ".join(map(str, kinds))
            raise RuntimeError(
                f"partition {self._partition.index} gave {given} where it was to give {expected}: what crosses "
                "between processes cannot depend on values. Use engine=threads"
            )

    def _gradients_of_output(self, gradients: Gradients) -> tuple[Gradients, dict[SkipName, Tensor | None]]:
        boundary = self._leaving
        if boundary is None or not self._carries_skips:
            return gradients, {}
        count = len(boundary.value)
        skips = dict(zip(boundary.skip_names, gradients[count:], strict=True))
        sent = [skips.pop(route.name, None) for route in self._partition.sends]
        return (*gradients[:count], *sent), skips

    def _gradients_of_input(self, gradients: Gradients, passing: dict[SkipName, Tensor | None]) -> Gradients:
        if self._partition.index == 0:
            return ()
        if self._carries_skips:
            boundary = self._entering
            count = len(boundary.value)
            names = (route.name for route in self._partition.receives)
            skips = {**passing, **dict(zip(names, gradients[count:], strict=True))}
            gradients = (*gradients[:count], *(skips[name] for name in boundary.skip_names))
        return tuple([None if gradient is None else gradient.contiguous() for gradient in gradients])

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
