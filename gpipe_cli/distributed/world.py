"""All processes that run one command, and what they must agree on.

A single process is a world of one, whose collectives return their argument. Ranks exchange numbers and text only, as
tensors: nothing that a peer sends is executed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from gpipe_cli.distributed.messages import gather_json, share_json
from gpipe_cli.errors import GpipeError, PeerError


@final
@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    """None stands for torch's default group."""

    @staticmethod
    def current() -> World:
        """The processes of torch's default group, or this process alone."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return World()
        return World(distributed.get_rank(), distributed.get_world_size())

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def for_thread(self, timeout: timedelta) -> World:
        """The same processes, with collectives that a thread may call while another uses those of this world.

        All processes call it together.
        """
        if self.size == 1:
            return self
        # gloo, because what ranks agree on is on the CPU.
        return replace(self, group=distributed.new_group(backend="gloo", timeout=timeout))

    def run_together(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` in every process; the JSON values that it returned, by rank.

        If it fails in one process, that process raises its error, and all others raise PeerError.
        """
        failure: Exception | None = None
        answer: dict[str, Any] = {}
        try:
            answer["value"] = work()
        except Exception as error:  # noqa: BLE001 - raised again once the others know
            kind = "" if isinstance(error, GpipeError) else f"{type(error).__name__}: "
            failure, answer["error"] = error, f"{kind}{error}"
        answers = [answer] if self.size == 1 else gather_json(answer, self._group)
        if failure is not None:
            raise failure
        for rank, other in enumerate(answers):
            if "error" in other:
                raise PeerError(f"rank {rank}: {other['error']}")
        return [other["value"] for other in answers]

    @property
    def _group(self) -> ProcessGroup:
        group = self.group or distributed.group.WORLD
        assert group is not None, "torch.distributed is initialized"
        return group

    def max(self, number: int) -> int:
        """The largest of the numbers that the ranks give."""
        if self.size == 1:
            return number
        largest = torch.tensor([number], dtype=torch.int64)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self.group)
        return int(largest)

    def min(self, number: int) -> int:
        return -self.max(-number)

    def sum(self, numbers: Tensor) -> Tensor:
        """The sums of whole numbers [n] over the ranks; a rank with nothing to add gives an empty tensor."""
        if self.size == 1:
            return numbers
        total = torch.zeros(self.max(len(numbers)), dtype=torch.int64)
        total[: len(numbers)] = numbers
        distributed.all_reduce(total, group=self.group)
        return total

    def from_any_rank(self, text: str) -> str:
        """The text of the only rank that has one; the others give an empty text."""
        encoded = torch.tensor(list(text.encode()), dtype=torch.int64)
        return text if self.size == 1 else bytes(self.sum(encoded).tolist()).decode()

    def from_rank_zero(self, text: str) -> str:
        """The text of rank 0; the text of the other ranks is ignored."""
        return text if self.size == 1 else str(share_json(text, 0, self._group))
