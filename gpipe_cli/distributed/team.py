"""The processes that run one command together, and the few things they must agree on.

A command that runs in one process is a team of one, and agrees with itself for nothing. Numbers and text only, as
tensors: nothing that comes from a peer is executed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, distributed


@final
@dataclass(frozen=True)
class Team:
    rank: int = 0
    size: int = 1

    @staticmethod
    def present() -> Team:
        """Those of torch's default group; without one, this process alone."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return Team()
        return Team(distributed.get_rank(), distributed.get_world_size())

    @property
    def leads(self) -> bool:
        """Whether this process is the one that speaks and writes."""
        return self.rank == 0

    def largest(self, number: int) -> int:
        """Of the numbers that all of them give."""
        if self.size == 1:
            return number
        found = torch.tensor([number], dtype=torch.int64)
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
        return int(found)

    def smallest(self, number: int) -> int:
        return -self.largest(-number)

    def of_leader(self, text: str) -> str:
        """The text that rank 0 gives; that of the others is not looked at."""
        if self.size == 1:
            return text
        encoded = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        length = self._from_leader(torch.tensor([len(encoded)], dtype=torch.int64))
        content = encoded if self.leads else torch.empty(int(length), dtype=torch.uint8)
        return bytes(self._from_leader(content).tolist()).decode()

    def _from_leader(self, tensor: Tensor) -> Tensor:
        distributed.broadcast(tensor, 0)
        return tensor
