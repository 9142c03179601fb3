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
        # The receiver allocates by the length, reads the table, then takes the tensors in its order. Only the tensors
        # are on the device: reading a length from there would make the host wait for everything queued before.
        text = [] if message is None else [_table(message)]
        lengths = [torch.zeros(1, dtype=torch.int64)] if receives else []
        self._post([torch.tensor([len(part)]) for part in text], lengths)
        received = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
        self._post(text, received)
        table, notes = decode(received[0]) if receives else ([], None)
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for name, dtype, shape in table
        }
        given = [] if message is None else [tensor.to(self._device) for tensor in message.tensors.values()]
        self._post(_as_bytes(given), _as_bytes(tensors.values()))
        return Message(tensors, notes)

    def _post(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send and receive in one batch. Wait for what is received; what is only sent arrives on its own."""
        # What has arrived is dropped, and its memory with it.
        self._sendings = [sending for sending in self._sendings if not sending.has_arrived]
        operation = partial(P2POp, group=self._group, group_peer=self._rank)
        operations = [
            *(operation(distributed.isend, tensor) for tensor in outgoing),
            *(operation(distributed.irecv, tensor) for tensor in incoming),
        ]
        if not operations:
            return
        sending = _Sending(distributed.batch_isend_irecv(operations), outgoing)
        if incoming:
            # Only once: gloo would wait a second time for a message that never comes.
            sending.wait()
        else:
            self._sendings.append(sending)


def _table(message: Message) -> Tensor:
    table = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in message.tensors.items()
    ]
    return encode([table, message.notes])


def _as_bytes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The bytes of each tensor that has any, on both sides: backends do not support every dtype."""
    return [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
