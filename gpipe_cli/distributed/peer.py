"""Messages between two processes of a group: tensors of any shapes and dtypes, and notes.

A backend such as NCCL blocks a send until it is received, and runs the operations of a process in the order in which
they were posted: two processes that each send before they receive would wait for each other forever. So `exchange`
posts both directions as one batch, whose operations start together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup, Work

from gpipe_cli.distributed.groups import device_of
from gpipe_cli.distributed.world import decode, encode, share_numbers
from gpipe_cli.pipeline.boundary import Gradients, PartitionInput
from gpipe_cli.pipeline.microbatch import Value

_LENGTH_BYTES = 8
_HEADER_BYTES = 1024
"""A header up to this size is one message: enough for a dozen tensors."""
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


@final
@dataclass(frozen=True, eq=False)
class Message:
    tensors: Mapping[str, Tensor]
    notes: Any = None
    """A JSON value."""


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
    """Another rank of a group. What one of the two sends, the other must receive, and both must exchange together."""

    def __init__(self, rank: int, group: ProcessGroup, device: torch.device) -> None:
        """device: where tensors are when they are sent and received; the group needs a backend for it."""
        self._rank, self._group, self._device = rank, group, device
        self._sendings: list[_Sending] = []

    def send(self, message: Message) -> None:
        """Start to send a message; `wait` waits for its arrival."""
        self._transfer(message, receives=False)

    def receive(self) -> Message:
        return self._transfer(None, receives=True)

    def exchange(self, message: Message) -> Message:
        """Send a message and receive one, neither before the other."""
        return self._transfer(message, receives=True)

    def wait(self) -> None:
        """Wait until everything sent has arrived."""
        for sending in self._sendings:
            sending.wait()
        self._sendings.clear()

    def _transfer(self, message: Message | None, *, receives: bool) -> Message:
        # Only the tensors are on the device: the host would have to wait for it to read what they are.
        header = _header(message) if message is not None else _NO_BYTES
        received = torch.empty(_HEADER_BYTES if receives else 0, dtype=torch.uint8)
        self._post([header[:_HEADER_BYTES]], [received])
        rest = torch.empty(_rest_length(received), dtype=torch.uint8)
        self._post([header[_HEADER_BYTES:]], [rest])
        table, notes = _content(torch.cat([received, rest])) if receives else ([], None)
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for name, dtype, shape in table
        }
        given = [] if message is None else [tensor.to(self._device) for tensor in message.tensors.values()]
        self._post(_as_bytes(given), _as_bytes(tensors.values()))
        return Message(tensors, notes)

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


def _header(message: Message) -> Tensor:
    """The names, dtypes and shapes of the tensors, and the notes; before them their length, after them zeros."""
    table = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in message.tensors.items()
    ]
    text = encode([table, message.notes])
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


@final
class P2PLink:
    """Sends values to the next process and gradients to the previous one, and receives the same from them.

    Every message says what it holds, so shapes, dtypes and the number of tensors may differ from one to the next. At
    the ends of the pipe there is nobody to send to and nothing to receive. Use it in a `with` statement, which waits
    until everything sent has arrived.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.ranks - 1
        device = device_of(group)
        self._previous = None if self.is_first else Peer(self.rank - 1, group, device)
        self._next = None if self.is_last else Peer(self.rank + 1, group, device)

    def __enter__(self) -> P2PLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after a failure the neighbour may never receive it
            for peer in (self._previous, self._next):
                if peer is not None:
                    peer.wait()

    def from_first(self, number: int) -> int:
        """The number of the first process; that of the others is ignored."""
        return int(share_numbers(torch.tensor([number]), 0, self._group))

    def receive_forward(self) -> PartitionInput:
        return _input(self._previous.receive() if self._previous else _NOTHING)

    def send_forward(self, value: Value) -> None:
        if self._next:
            self._next.send(_values(value))

    def receive_backward(self) -> Gradients:
        return _gradients(self._next.receive() if self._next else _NOTHING)

    def send_backward(self, gradients: Gradients) -> None:
        if self._previous:
            self._previous.send(_message(gradients, None))

    def send_forward_receive_backward(self, value: Value) -> Gradients:
        return _gradients(self._next.exchange(_values(value)) if self._next else _NOTHING)

    def send_backward_receive_forward(self, gradients: Gradients) -> PartitionInput:
        return _input(self._previous.exchange(_message(gradients, None)) if self._previous else _NOTHING)


def _message(tensors: Gradients, notes: Any) -> Message:
    present = {str(index): tensor for index, tensor in enumerate(tensors) if tensor is not None}
    return Message(present, [len(tensors), notes])


def _values(value: Value) -> Message:
    tensors = (value,) if isinstance(value, Tensor) else value
    # Whether a tensor needs a gradient travels along: the receiver decides by it what to send back.
    needs_grad = [tensor.requires_grad for tensor in tensors]
    return _message(tuple(tensor.detach() for tensor in tensors), needs_grad)


_NOTHING = _message((), [])
"""What arrives at the ends of the pipe."""


def _gradients(message: Message) -> Gradients:
    count, _ = message.notes
    return tuple(message.tensors.get(str(index)) for index in range(count))


def _input(message: Message) -> PartitionInput:
    _, needs_grad = message.notes
    return PartitionInput(_gradients(message), tuple(needs_grad))
