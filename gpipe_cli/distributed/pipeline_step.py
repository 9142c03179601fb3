"""One step of a pipeline whose partitions are functions of yours, one in each process of the group `pipe`.

Forward and backward alternate as early as possible (1f1b), and gradients add up in the order of the micro-batches. A
micro-batch's loss weighs as much as its rows, so gradients are those of the mean loss of the whole batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.distributed.gradients import refusing_reducers
from gpipe_cli.distributed.groups import PIPE, get_group
from gpipe_cli.distributed.peer import P2PLink
from gpipe_cli.errors import ConfigError, PeerError
from gpipe_cli.pipeline.boundary import Gradients, GradSink, PartitionInput, enter
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.microbatch import Batch, Value, gather, micro_batches
from gpipe_cli.pytree import flatten, unflatten

Inputs = Tensor | Mapping[str, Tensor] | Sequence[Tensor | Mapping[str, Tensor]] | None
Forward = Callable[[Any], Any]
"""Takes a single tensor or dict as it is, several as a list: what the previous process sent, then the inputs."""
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
    """Run every micro-batch through all processes; call it in each of them.

    inputs: in the first process the batch; in the others what their function needs besides, such as targets, or None.
    fwd_fn: in the last process it returns the mean loss of its micro-batch; with `forward_only`, anything.
    dtype: the dtype in which floating-point tensors are sent; None leaves them as they are.
    Returns the mean loss in the last process, or all rows with `forward_only`; None in the others.
    Gradients are those of this replica's batch: `average_gradients` averages them, DistributedDataParallel is refused.
    """
    if scatter_gather_tensors:
        raise ConfigError(
            "scatter_gather_tensors=True: divides tensors among the processes of a tensor-parallel group, "
            "which gpipe does not have; remove it"
        )
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches={num_microbatches}: must be at least 1")
    with P2PLink(get_group(PIPE)) as link:
        step = _prepare(link, fwd_fn, inputs, num_microbatches, dtype)
        if forward_only:
            return step.forward_all()
        if optimizer is not None:
            optimizer.zero_grad()
        return step.train(bwd_fn or _backward)


def forward_eval(fwd_fn: Forward, inputs: Inputs, dtype: torch.dtype | None = None) -> Any:
    """Run the whole batch at once without gradients; the last process returns the output."""
    return forward_backward(None, fwd_fn, None, inputs, forward_only=True, dtype=dtype)


def _prepare(link: P2PLink, forward: Forward, inputs: Inputs, count: int, dtype: torch.dtype | None) -> _Step:
    """Split the batch; the first process sends the number of rows, because the others may have no inputs to count."""
    single = isinstance(inputs, Tensor) or (isinstance(inputs, Mapping) and inputs)
    own = (inputs,) if single else tuple(inputs or ())
    batch = Batch(own, "inputs") if own else None
    # A collective, in which all processes learn whether the first has inputs: if not, all of them raise.
    rows = link.from_first(NO_INPUTS if batch is None else batch.rows)
    if rows == NO_INPUTS:
        if link.is_first:
            raise ConfigError("inputs: the first process of a pipe needs the batch; it was given nothing")
        raise PeerError("the first process of the pipe was given no inputs")
    if batch is not None and batch.rows != rows:
        raise ConfigError(f"inputs: have {batch.rows} rows, those of the first process {rows}")
    parts = micro_batches(rows, count)
    slices: list[tuple[Any, ...]] = [()] * len(parts)
    if batch is not None:
        slices = [unflatten(batch.template, tensors) for tensors in batch.scatter(len(parts))]
    return _Step(link, forward, parts, slices, rows, dtype)


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
    link: P2PLink
    forward: Forward
    parts: Sequence[MicroBatch]
    inputs: Sequence[tuple[Any, ...]]
    """Tensors and dicts of each micro-batch."""
    rows: int
    dtype: torch.dtype | None

    def forward_all(self) -> Any:
        outputs = []
        with torch.no_grad():
            for part in self.parts:
                output = self._run(part, self.link.receive_forward()).output
                outputs.append(output)
                self.link.send_forward(output)
        if not self.link.is_last:
            return None
        if isinstance(outputs[0], Tensor) and outputs[0].dim() == 0:
            return self._mean([output for output in outputs if isinstance(output, Tensor)])
        tensors, template = gather([flatten(output, "output") for output in outputs])
        return unflatten(template, tensors)

    def train(self, backward: Backward) -> Tensor | None:
        link = self.link
        # The warm-up of 1f1b: a micro-batch has that many processes still to pass before its gradient starts back. A
        # longer one would only keep more activations alive.
        ahead = min(link.ranks - link.rank - 1, len(self.parts))
        waiting: deque[_ForwardResult] = deque()
        for part in self.parts[:ahead]:
            waiting.append(self._run(part, link.receive_forward()))
            link.send_forward(waiting[-1].output)
        losses = []
        received = link.receive_forward() if ahead < len(self.parts) else None
        for part in self.parts[ahead:]:
            assert received is not None, "received before the loop, or with the last gradient sent"
            result = self._run(part, received)
            waiting.append(result)
            if link.is_last:
                losses.append(_loss(result.output).detach())
            # The next process has a gradient to send by now, and the previous one its next output. `peer` says why
            # sending and receiving must not follow each other here.
            gradients = link.send_forward_receive_backward(result.output)
            # Oldest first in every process: receives match sends without tags, and gradients add up in one order.
            sent = self._run_backward(waiting.popleft(), gradients, backward)
            if part is self.parts[-1]:
                link.send_backward(sent)
            else:
                received = link.send_backward_receive_forward(sent)
        while waiting:
            link.send_backward(self._run_backward(waiting.popleft(), link.receive_backward(), backward))
        return self._mean(losses) if losses else None

    def _run(self, part: MicroBatch, received: PartitionInput) -> _ForwardResult:
        sink = GradSink(received.needs_grad)
        given = [*enter((received,), sink)[0], *self.inputs[part.index]]
        # The first micro-batch shows whether a wrapper reduces gradients; without gradients any wrapper is fine.
        checks_wrappers = part.index == 0 and torch.is_grad_enabled()
        with refusing_reducers() if checks_wrappers else nullcontext():
            output = self.forward(given[0] if len(given) == 1 else given)
        value = _checked(tuple(output) if isinstance(output, list) else output)
        return _ForwardResult(part, sink, value if self.link.is_last else self._as_sent(value))

    def _run_backward(self, result: _ForwardResult, gradients: Gradients, backward: Backward) -> Gradients:
        """Run the backward: from the gradients of the output to those of what was received."""
        with result.sink:
            if self.link.is_last:
                backward(_loss(result.output) * (result.part.size / self.rows), None)
            else:
                single = isinstance(result.output, Tensor)
                backward(result.output, gradients[0] if single else gradients)
        return result.sink.take()

    def _as_sent(self, value: Value) -> Value:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

        return cast(value) if isinstance(value, Tensor) else tuple(cast(tensor) for tensor in value)

    def _mean(self, losses: Sequence[Tensor]) -> Tensor:
        weighted = [loss * (part.size / self.rows) for loss, part in zip(losses, self.parts, strict=True)]
        return torch.stack(weighted).sum()


def _members(value: Tensor | tuple[Any, ...]) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _checked(output: Any) -> Tensor | tuple[Tensor, ...]:
    """Require a tensor, or a tuple of nothing but tensors."""
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
    """The default `bwd_fn`."""
    outputs = _members(output)
    gradients = (None,) * len(outputs) if gradient is None else _members(gradient)
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    # A tensor that no later process used has no gradient, and adds nothing.
    used = [pair for pair in pairs if pair[1] is not None or gradient is None]
    if used:
        torch.autograd.backward([tensor for tensor, _ in used], [grad for _, grad in used])
