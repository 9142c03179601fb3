"""One step of a pipeline whose partitions are functions of yours, one in each process of the group `pipe`.

Forward and backward alternate as early as they can (1f1b), with gradients added up in the order of the micro-batches.
Every row of the batch counts once, however it divides: a micro-batch's loss weighs as much as its rows, so gradients
are those of the mean loss of the whole batch. Knows nothing of models, optimizers or losses beyond that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.distributed.gradients import refusing_reducers
from gpipe_cli.distributed.line import Line
from gpipe_cli.errors import ConfigError, PeerError
from gpipe_cli.pipeline.boundary import GradSink, PartitionInput, enter
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.microbatch import Batch, Value, gather, micro_batches
from gpipe_cli.pipeline.pytree import flatten, unflatten

__all__ = ["forward_backward", "forward_eval"]

Inputs = Tensor | Sequence[Tensor]
Forward = Callable[[Any], Any]
"""Takes what it is given as it is, if that is one tensor, else a list: what the process before sent, then inputs."""
Backward = Callable[[Any, Any], object]
"""Takes an output and its gradient; None for the gradient of a loss."""
NO_INPUTS = -1


def forward_backward(
    optimizer: torch.optim.Optimizer | None,
    fwd_fn: Forward,
    bwd_fn: Backward | None,
    inputs: Inputs,
    num_microbatches: int = 1,
    forward_only: bool = False,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Any:
    """Run every micro-batch through all processes, which all call this; the last one gets what comes out.

    inputs: of the first process the batch, of the others what their function needs besides, such as targets.
    fwd_fn: the last process's gives the mean loss of its micro-batch; with `forward_only`, anything.
    dtype: what floating-point tensors cross from process to process in; None: as they are.
    Returned in the last process: the mean loss, or with `forward_only` all rows; in the others None.
    Gradients are those of this replica's batch: `average_gradients` averages them, DistributedDataParallel is refused.
    """
    if scatter_gather_tensors:
        raise ConfigError(
            "scatter_gather_tensors=True: divides tensors among the processes of a tensor-parallel group, "
            "which gpipe does not have; leave it out"
        )
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches={num_microbatches}: must be at least 1")
    with Line.present() as line:
        step = _begun(line, fwd_fn, inputs, num_microbatches, dtype)
        if forward_only:
            return step.forward_all()
        if optimizer is not None:
            optimizer.zero_grad()
        return step.train(bwd_fn or _backward)


def forward_eval(fwd_fn: Forward, inputs: Inputs, dtype: torch.dtype | None = None) -> Any:
    """The whole batch at once, without gradients; the last process gets what comes out."""
    return forward_backward(None, fwd_fn, None, inputs, forward_only=True, dtype=dtype)


def _begun(line: Line, forward: Forward, inputs: Inputs, count: int, dtype: torch.dtype | None) -> _Step:
    """The first process says how many rows there are: the others may have nothing to count."""
    own = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    batch = Batch(own, "inputs") if own else None
    rows = line.of_first(NO_INPUTS if batch is None else batch.rows)
    if rows == NO_INPUTS:
        if line.is_first:
            raise ConfigError("inputs: the first process of a pipe needs the batch; it was given nothing")
        raise PeerError("the first process of the pipe was given no inputs")
    if batch is not None and batch.rows != rows:
        raise ConfigError(f"inputs: have {batch.rows} rows, those of the first process {rows}")
    parts = micro_batches(rows, count)
    slices = [()] * len(parts) if batch is None else batch.scatter(len(parts))
    return _Step(line, forward, parts, slices, rows, dtype)


@final
@dataclass(frozen=True)
class _ForwardResult:
    """A micro-batch between its forward and its backward."""

    part: MicroBatch
    sink: GradSink
    output: Value


@final
@dataclass(frozen=True)
class _Step:
    line: Line
    forward: Forward
    parts: Sequence[MicroBatch]
    inputs: Sequence[tuple[Tensor, ...]]
    rows: int
    dtype: torch.dtype | None

    def forward_all(self) -> Any:
        with torch.no_grad():
            outputs = [self._run(part).output for part in self.parts]
        if not self.line.is_last:
            return None
        if isinstance(outputs[0], Tensor) and outputs[0].dim() == 0:
            return self._mean([one for one in outputs if isinstance(one, Tensor)])
        tensors, template = gather([flatten(one, "output") for one in outputs])
        return unflatten(template, tensors)

    def train(self, backward: Backward) -> Tensor | None:
        waiting: deque[_ForwardResult] = deque()
        losses = []
        ahead = self.line.ranks - self.line.rank - 1
        for part in self.parts:
            result = self._run(part)
            waiting.append(result)
            if self.line.is_last:
                losses.append(_loss(result.output).detach())
            if len(waiting) > ahead:
                self._run_back(waiting.popleft(), backward)
        while waiting:
            self._run_back(waiting.popleft(), backward)
        return self._mean(losses) if losses else None

    def _run(self, part: MicroBatch) -> _ForwardResult:
        received = PartitionInput((), ()) if self.line.is_first else self.line.receive()
        sink = GradSink(received.needs_grad)
        given = [*enter((received,), sink)[0], *self.inputs[part.index]]
        # One micro-batch shows how the layers are wrapped; without gradients any wrapper is right.
        watched = part.index == 0 and torch.is_grad_enabled()
        with refusing_reducers() if watched else nullcontext():
            output = self.forward(given[0] if len(given) == 1 else given)
        value = _checked(tuple(output) if isinstance(output, list) else output)
        if not self.line.is_last:
            value = self._as_sent(value)
            self.line.send_on(_members(value))
        return _ForwardResult(part, sink, value)

    def _run_back(self, result: _ForwardResult, backward: Backward) -> None:
        with result.sink:
            if self.line.is_last:
                backward(_loss(result.output) * (result.part.size / self.rows), None)
            else:
                gradients = self.line.receive_back()
                single = isinstance(result.output, Tensor)
                backward(result.output, gradients[0] if single else gradients)
        if not self.line.is_first:
            self.line.send_back(result.sink.take())

    def _as_sent(self, value: Value) -> Value:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

        return cast(value) if isinstance(value, Tensor) else tuple(cast(one) for one in value)

    def _mean(self, losses: Sequence[Tensor]) -> Tensor:
        weighted = [loss * (part.size / self.rows) for loss, part in zip(losses, self.parts, strict=True)]
        return torch.stack(weighted).sum()


def _members(value: Tensor | tuple[Any, ...]) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _checked(output: Any) -> Tensor | tuple[Tensor, ...]:
    """What a process may send on: a tensor or a tuple of nothing but tensors."""
    for member in _members(output):
        if not isinstance(member, Tensor):
            raise TypeError(f"fwd_fn: expected Tensor, but got {type(member).__name__}")
    checked: Tensor | tuple[Tensor, ...] = output
    return checked


def _loss(output: Value) -> Tensor:
    if not isinstance(output, Tensor) or output.dim():
        raise ConfigError("fwd_fn: the last process of a pipe must give its loss, a tensor of one number")
    return output


def _backward(output: Any, gradient: Any) -> None:
    """What `bwd_fn` is without one of the caller's."""
    outputs = _members(output)
    gradients = (None,) * len(outputs) if gradient is None else _members(gradient)
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    # A float that nobody further on has used has no gradient, and adds nothing.
    used = [pair for pair in pairs if pair[1] is not None or gradient is None]
    if used:
        torch.autograd.backward([one for one, _ in used], [other for _, other in used])
