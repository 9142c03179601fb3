"""The connection of a process to its neighbours in the pipe."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from gpipe_cli.distributed.backends import device_of
from gpipe_cli.distributed.groups import PIPE, get_group
from gpipe_cli.distributed.messages import share_numbers
from gpipe_cli.distributed.peer import Message, Peer
from gpipe_cli.pipeline.boundary import Gradients, PartitionInput
from gpipe_cli.pipeline.microbatch import Value


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

    @classmethod
    def current(cls) -> P2PLink:
        return cls(get_group(PIPE))

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
