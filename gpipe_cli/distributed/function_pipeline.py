"""One step of a pipeline whose partitions are the user's functions, one in each process, and the messages between them.

This is the Python API of `gpipe_cli.distributed`; `engine=processes` sends its tensors in `stage`. Forward and backward
alternate as early as possible (1f1b), and gradients add up in the order of the micro-batches. A micro-batch's loss
weighs as much as its rows, so gradients are those of the mean loss of the whole batch.

A backend such as NCCL blocks a send until it is received, and runs the operations of a process in the order in which
they were posted: two processes that each send before they receive would wait for each other forever. So
`Peer.exchange` posts both directions as one batch, whose operations start together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, distributed, nn
from torch.distributed import P2POp, ProcessGroup, Work

from gpipe_cli.distributed.groups import PIPE, device_of, get_group
from gpipe_cli.distributed.world import broadcast_numbers, decode, encode
from gpipe_cli.errors import ConfigError, PeerError
from gpipe_cli.pipeline.boundary import Gradients, GradSink, PartitionInput, enter
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.microbatch import Batch, Value, gather, micro_batches
from gpipe_cli.pytree import flatten, unflatten
from gpipe_cli.torch_internals.gradients import noticing_reducers

Inputs = Tensor | Mapping[str, Tensor] | Sequence[Tensor | Mapping[str, Tensor]] | None
Forward = Callable[[Any], Any]
"""Takes a single tensor or dict as it is, several as a list: what the previous process sent, then the inputs."""
Backward = Callable[[Any, Any], object]
"""Takes an output and its gradient; None for the gradient of a loss."""
NO_INPUTS = -1
_LENGTH_BYTES = 8
_HEADER_BYTES = 1024
"""A header up to this size is one message: enough for a dozen tensors."""
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


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
    Gradients come from this replica's batch: `average_gradients` averages them, DistributedDataParallel is refused.
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
        raise ConfigError(f"inputs: have {batch.rows} rows, the inputs of the first process {rows}")
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
                output = self._run(part, self.link.previous.receive()).output
                outputs.append(output)
                self.link.next.send(_message(output))
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
            waiting.append(self._run(part, link.previous.receive()))
            link.next.send(_message(waiting[-1].output))
        losses = []
        received = link.previous.receive() if ahead < len(self.parts) else None
        for part in self.parts[ahead:]:
            assert received is not None, "received before the loop, or with the last gradient sent"
            result = self._run(part, received)
            waiting.append(result)
            if link.is_last:
                losses.append(_loss(result.output).detach())
            # The next process has a gradient to send by now, and the previous one its next output, so sending and
            # receiving must not follow each other here.
            gradients = link.next.exchange(_message(result.output)).tensors
            # Oldest first in every process: receives match sends without tags, and gradients add up in one order.
            sent = PartitionInput(self._run_backward(waiting.popleft(), gradients, backward), ())
            if part is self.parts[-1]:
                link.previous.send(sent)
            else:
                received = link.previous.exchange(sent)
        while waiting:
            gradients = link.next.receive().tensors
            link.previous.send(PartitionInput(self._run_backward(waiting.popleft(), gradients, backward), ()))
        return self._mean(losses) if losses else None

    def _run(self, part: MicroBatch, received: PartitionInput) -> _ForwardResult:
        sink = GradSink(received.needs_grad)
        given = [*enter((received,), sink)[0], *self.inputs[part.index]]
        # The first micro-batch shows whether a wrapper reduces gradients; without gradients any wrapper is fine.
        checks_wrappers = part.index == 0 and torch.is_grad_enabled()
        with noticing_reducers(_refuse) if checks_wrappers else nullcontext():
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


def _refuse(wrapper: nn.Module) -> None:
    # Such a wrapper counts on a backward after each forward, and leaves gradients unreduced in silence.
    raise ConfigError(
        f"fwd_fn: {type(wrapper).__name__} around the layers of a pipe gives wrong gradients, since several "
        "micro-batches are under way at once; remove it and call "
        "gpipe_cli.distributed.average_gradients(model.parameters()) after forward_backward"
    )


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


@final
class P2PLink:
    """The previous process, which sends values and receives gradients, and the next one, for which it is the reverse.

    Use it in a `with` statement, which waits until everything sent has arrived.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.ranks - 1
        device = device_of(group)
        self.previous = Peer(None if self.is_first else self.rank - 1, group, device)
        self.next = Peer(None if self.is_last else self.rank + 1, group, device)

    def __enter__(self) -> P2PLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after a failure the neighbour may never receive it
            self.previous.wait()
            self.next.wait()

    def from_first(self, number: int) -> int:
        """The number of the first process; that of the others is ignored."""
        return int(broadcast_numbers(torch.tensor([number]), 0, self._group))


def _message(value: Value) -> PartitionInput:
    tensors = (value,) if isinstance(value, Tensor) else value
    # Whether a tensor needs a gradient travels along: the receiver decides by it what to send back.
    needs_grad = tuple(tensor.requires_grad for tensor in tensors)
    return PartitionInput(tuple(tensor.detach() for tensor in tensors), needs_grad)


@final
@dataclass(frozen=True, eq=False)
class _Sending:
    works: Sequence[Work]
    tensors: Sequence[Tensor]
    """Their memory must stay allocated until they have arrived."""

    @property
    def has_arrived(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@final
class Peer:
    """Another rank of a group. What one of the two sends, the other must receive, and both must exchange together.

    Every message says what it holds, so shapes, dtypes and the number of tensors may differ from one to the next.
    """

    def __init__(self, rank: int | None, group: ProcessGroup, device: torch.device) -> None:
        """rank: None at an end of the pipe, where nobody is.
        device: where tensors are when they are sent and received; the group needs a backend for it.
        """
        self._rank, self._group, self._device = rank, group, device
        self._sendings: list[_Sending] = []

    def send(self, message: PartitionInput) -> None:
        """Start to send a message; `wait` waits for its arrival."""
        self._transfer(message, receives=False)

    def receive(self) -> PartitionInput:
        return self._transfer(None, receives=True)

    def exchange(self, message: PartitionInput) -> PartitionInput:
        """Send a message and receive one, neither before the other."""
        return self._transfer(message, receives=True)

    def wait(self) -> None:
        """Wait until everything sent has arrived."""
        for sending in self._sendings:
            sending.wait()
        self._sendings.clear()

    def _transfer(self, message: PartitionInput | None, *, receives: bool) -> PartitionInput:
        if self._rank is None:
            return PartitionInput((), ())
        # Only the tensors are on the device: the host would have to wait for it to read what they are.
        header = _header(message) if message is not None else _NO_BYTES
        received = torch.empty(_HEADER_BYTES if receives else 0, dtype=torch.uint8)
        self._post([header[:_HEADER_BYTES]], [received])
        rest = torch.empty(_rest_length(received), dtype=torch.uint8)
        self._post([header[_HEADER_BYTES:]], [rest])
        table, needs_grad = _content(torch.cat([received, rest])) if receives else ([], ())
        tensors = tuple([None if each is None else self._buffer(*each) for each in table])
        given = [] if message is None else [tensor.to(self._device) for tensor in message.present]
        arriving = PartitionInput(tensors, tuple(needs_grad))
        self._post(_as_bytes(given), _as_bytes(arriving.present))
        return arriving

    def _buffer(self, dtype: str, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)

    def _post(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send and receive in one batch, without empty tensors. Wait unless nothing is received."""
        # What has arrived is dropped, and its memory with it.
        self._sendings = [sending for sending in self._sendings if not sending.has_arrived]
        operation = partial(P2POp, group=self._group, group_peer=self._rank)
        operations = [
            operation(kind, tensor)
            for kind, tensors in ((distributed.isend, outgoing), (distributed.irecv, incoming))
            for tensor in tensors
            if tensor.numel()
        ]
        if not operations:
            return
        sending = _Sending(distributed.batch_isend_irecv(operations), outgoing)
        if any(tensor.numel() for tensor in incoming):
            # Only once: gloo would wait a second time for a message that never comes.
            sending.wait()
        else:
            self._sendings.append(sending)


def _header(message: PartitionInput) -> Tensor:
    """The dtypes and shapes of the tensors, and which need a gradient; before them their length, after them zeros."""
    table = [
        None if tensor is None else [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for tensor in message.tensors
    ]
    text = encode([table, message.needs_grad])
    length = torch.tensor([len(text)]).view(torch.uint8)
    return torch.cat([length, text, text.new_zeros(max(0, _HEADER_BYTES - len(length) - len(text)))])


def _rest_length(header: Tensor) -> int:
    """How many bytes of the header follow in another message."""
    return max(0, _LENGTH_BYTES + _text_length(header) - _HEADER_BYTES) if len(header) else 0


def _content(header: Tensor) -> Any:
    return decode(header[_LENGTH_BYTES : _LENGTH_BYTES + _text_length(header)])


def _text_length(header: Tensor) -> int:
    return int(header[:_LENGTH_BYTES].view(torch.int64))


def _as_bytes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Backends do not support every dtype."""
    return [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
