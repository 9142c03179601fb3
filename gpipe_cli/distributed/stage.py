"""A partition as torch's pipelining sees it: a module with one autograd node.

torch runs the backward of the node and passes the gradient on. Inside the node, the partition does what it does under
every engine: boundaries, keys, recompute, aliases, and its own split of the backward. torch's split would run a
checkpointed forward three times and needs a graph of its own kind; a `dw_builder` replaces it by ours.

torch counts micro-batches from 0 in each flush and runs them in ascending order, so the stage counts along. The first
stage takes its input from the batch state and the last one stores its output there, because torch would split both,
and only evenly. Tensors are sent contiguous, as gloo requires, and in the announced shape: torch would not notice a
wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gpipe_cli.distributed.boundary_shapes import BoundarySpec, TensorSpec
from gpipe_cli.distributed.gradient_buckets import GradientBuckets
from gpipe_cli.pipeline.batch_state import BatchState
from gpipe_cli.pipeline.boundary import ANCHOR, Gradients, PartitionInput
from gpipe_cli.pipeline.failures import add_note, failure_note
from gpipe_cli.pipeline.forward_task import SavedForBackward
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.schedule.action import Action, Kind
from gpipe_cli.skip.namespace import SkipName
from gpipe_cli.torch_internals.autograd_engine import apply


@final
class Stage(nn.Module):
    def __init__(
        self,
        partition: Partition,
        entering: BoundarySpec,
        leaving: BoundarySpec | None,
        gradient_buckets: GradientBuckets | None,
        *,
        split: Collection[int],
    ) -> None:
        """gradient_buckets: None if there are no other replicas to sum gradients with.

        split: the micro-batches of a flush whose backward is split.
        """
        super().__init__()
        self._partition = partition
        self._entering = entering
        self._leaving = leaving
        self._gradient_buckets = gradient_buckets
        self.split = split
        self._progress = _Progress()
        # Worked out once: for small layers, every line that runs per micro-batch counts.
        self._carries_skips = bool(
            entering.skips or partition.receives or partition.sends or (leaving is not None and leaving.skips)
        )
        self._entering_needs = tuple(kind.needs_grad for kind in entering.value)
        self._leaving_kinds = () if leaving is None else leaving.kinds
        self._leaving_needs = tuple(kind.needs_grad for kind in self._leaving_kinds)

    def begin(self, state: BatchState, first: int) -> None:
        """The next flush runs this mini-batch from micro-batch `first` on."""
        progress = self._progress
        progress.state, progress.first, progress.micro_batch = state, first, first

    def end(self) -> None:
        self._progress.state = self._progress.half_done = None

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        micro_batch = self._progress.micro_batch
        self._progress.micro_batch += 1
        if torch.is_grad_enabled():
            # ANCHOR requires a gradient: the first stage receives no tensors, and would have no autograd node without
            # it.
            sent: tuple[Tensor, ...] = apply(_StageFunction, self, micro_batch, ANCHOR, *received)
        else:
            sent = self.run(micro_batch, received).present
        # torch treats the output of the last stage as the loss, which is one tensor.
        return sent if self._leaving is not None else sent[0]

    def run(self, micro_batch: int, received: tuple[Tensor, ...]) -> PartitionInput:
        """Run the forward of one micro-batch; return what is sent on, and which tensors need a gradient."""
        state, index = self._state, self._partition.index
        with self._noting(Kind.FORWARD, "forward", micro_batch), state.batch.state.restored():
            given, passing = self._unpack(micro_batch, received)
            output, saved = self._partition.forward((given,), state.forward_task(index, micro_batch))
            if saved is not None and state.batch.state.grad:
                state.saved[index, micro_batch] = saved
            return self._pack(micro_batch, output, passing)

    def run_backward(self, micro_batch: int, gradients: Gradients) -> Gradients:
        """Run the backward: from the gradients of the sent tensors to those of the received ones."""
        state, partition = self._state, self._partition
        saved = state.saved[partition.index, micro_batch]
        if saved.inputs is not None:
            with self._noting(Kind.BACKWARD, "recompute", micro_batch), state.batch.state.entered():
                partition.recompute(saved)
        leaving, passing = self._gradients_of_output(gradients)
        with self._noting(Kind.BACKWARD, "backward", micro_batch), self._completing(micro_batch):
            if micro_batch - self._progress.first in self.split:
                entering = partition.backward_input(saved, leaving, keep_graph=False)
                # torch asks for the second half right after the first, so one slot is enough.
                self._progress.half_done = saved
            else:
                entering = partition.backward(saved, leaving, keep_graph=False)
        # The graph is freed here, unless the weight half of a split backward still needs it.
        del state.saved[partition.index, micro_batch]
        return self._gradients_of_input(entering, passing)

    def weights_half(self) -> Callable[[], None]:
        """The weight half of the backward that has just run, for later: torch's `dw_builder`."""
        saved, self._progress.half_done = self._progress.half_done, None

        def run() -> None:
            if saved is not None:
                micro_batch = saved.task.micro_batch.index
                with self._noting(Kind.WEIGHT_GRAD, "backward", micro_batch), self._completing(micro_batch):
                    self._partition.backward_weights(saved, keep_graph=False)

        return run

    @property
    def _state(self) -> BatchState:
        assert self._progress.state is not None, "a flush has begun"
        return self._progress.state

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
            return PartitionInput(tuple(tensors), needed, boundary.template, count), {}
        kinds = dict(boundary.skips)
        skips = dict(zip(boundary.skip_names, tensors[count:], strict=True))
        names = [route.name for route in self._partition.receives]
        popped = [skips.pop(name, None) for name in names]
        needs = [kind.needs_grad for kind in boundary.value] + [
            name in kinds and kinds[name].needs_grad for name in names
        ]
        return PartitionInput(
            (*tensors[:count], *popped),
            tuple(need and grad for need in needs),
            boundary.template,
            count,
            len(popped),
        ), skips

    def _pack(
        self, micro_batch: int, outputs: tuple[PartitionInput, ...], passing: dict[SkipName, Tensor]
    ) -> PartitionInput:
        boundary = self._leaving
        if boundary is None:
            (self._state.outputs[micro_batch],) = outputs
            return outputs[0]
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
        grad = self._state.batch.state.grad
        return PartitionInput(present, self._leaving_needs if grad else (False,) * len(present))

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
        if not self._carries_skips:
            return gradients
        boundary = self._entering
        count = len(boundary.value)
        names = (route.name for route in self._partition.receives)
        skips = {**passing, **dict(zip(names, gradients[count:], strict=True))}
        return (*gradients[:count], *(skips[name] for name in boundary.skip_names))

    def _completing(self, micro_batch: int) -> AbstractContextManager[None]:
        """Backward runs in ascending order of micro-batches, so that of the last one completes the gradients."""
        if self._gradient_buckets is None or micro_batch + 1 < len(self._state.batch.micro_batches):
            return nullcontext()
        return self._gradient_buckets.last_backward()

    @contextmanager
    def _noting(self, kind: Kind, phase: str, micro_batch: int) -> Iterator[None]:
        """Keep the first error: torch wraps whatever a stage raises in an error of its own."""
        try:
            yield
        except BaseException as error:
            state, partition = self._state, self._partition
            # The first failure wins: later ones follow from it.
            state.failure = state.failure or error
            saved = state.saved.get((partition.index, micro_batch))
            action = Action(kind, partition.index, micro_batch)
            raised = error
            add_note(
                raised,
                lambda: failure_note(
                    action, phase, partition.locate(phase, saved, raised), partition.device, raised
                ),
            )
            raise


@final
@dataclass(slots=True)
class _Progress:
    """Where a stage is in its flush. Not attributes of the stage: a module looks at each value it is assigned."""

    state: BatchState | None = None
    first: int = 0
    """The micro-batch that the flush began with."""
    micro_batch: int = 0
    half_done: SavedForBackward | None = None


@final
class _StageFunction(Function):
    """One micro-batch at one stage."""

    @staticmethod
    def forward(
        ctx: Any, stage: Stage, micro_batch: int, anchor: Tensor, *received: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.stage, ctx.micro_batch = stage, micro_batch
        # None has to stay None: with zeros, layers that no loss depends on would get gradients of zero instead of
        # none.
        ctx.set_materialize_grads(False)
        sent = stage.run(micro_batch, received)
        tensors = sent.present
        ctx.mark_non_differentiable(
            *(tensor for tensor, needed in zip(tensors, sent.needs_grad, strict=True) if not needed)
        )
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, None, None, *ctx.stage.run_backward(ctx.micro_batch, gradients))
