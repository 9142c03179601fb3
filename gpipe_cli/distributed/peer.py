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

from gpipe_cli.distributed.messages import decode, encode

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
