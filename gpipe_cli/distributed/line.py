"""The neighbours of this process in its pipe, and what crosses to and from them: values one way, gradients the other.

Every message says what it holds, so shapes, dtypes and the number of tensors may differ from one to the next. Decides
the form of messages; knows nothing of the order in which they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from gpipe_cli.distributed.exchange import Sending, begin_sending, receive_on_device, share_numbers
from gpipe_cli.distributed.groups import PIPE, get_group
from gpipe_cli.pipeline.boundary import Gradients, PartitionInput

__all__ = ["Line"]


@final
class Line:
    """Use it in a `with`: after it nothing is on its way any more."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sent: list[Sending] = []
        self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)
        on_cuda = "nccl" in distributed.get_backend(group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")

    @classmethod
    def present(cls) -> Line:
        return cls(get_group(PIPE))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.ranks - 1

    def __enter__(self) -> Line:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # a neighbour of a process that failed may never take what was sent
            for sending in self._sent:
                sending.work.wait()

    def of_first(self, number: int) -> int:
        """What the first process says; the number of the others is not looked at."""
        return int(share_numbers(torch.tensor([number]), 0, self._group, self.device))

    def send_on(self, tensors: Sequence[Tensor]) -> None:
        needs_grad = [tensor.requires_grad for tensor in tensors]
        self._send(tuple(tensor.detach() for tensor in tensors), needs_grad, self.rank + 1)

    def receive(self) -> PartitionInput:
        tensors, needs_grad = self._received(self.rank - 1)
        return PartitionInput(tensors, tuple(needs_grad))

    def send_back(self, gradients: Gradients) -> None:
        self._send(gradients, None, self.rank - 1)

    def receive_back(self) -> Gradients:
        return self._received(self.rank + 1)[0]

    def _send(self, tensors: Gradients, notes: Any, to: int) -> None:
        self._sent = [sending for sending in self._sent if not sending.work.is_completed()]
        present = {str(place): one for place, one in enumerate(tensors) if one is not None}
        self._sent += begin_sending(present, [len(tensors), notes], to, self._group, self.device)

    def _received(self, source: int) -> tuple[tuple[Tensor | None, ...], Any]:
        present, (count, notes) = receive_on_device(source, self._group, self.device)
        return tuple(present.get(str(place)) for place in range(count)), notes
