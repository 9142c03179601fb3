"""All processes that run one command, and what they must agree on.

A single process is a world of one, whose collectives return their argument. Ranks exchange numbers and text only, as
tensors on the CPU: nothing that a peer sends is executed. They travel over gloo whatever the device of the model is, so
a process reads them without waiting for its device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

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
        """These processes, with collectives that a thread may call while another uses those of this world.

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
        answers = gather_json(answer, self._group)
        if failure is not None:
            raise failure
        for rank, other in enumerate(answers):
            if "error" in other:
                raise PeerError(f"rank {rank}: {other['error']}")
        return [other["value"] for other in answers]

    @property
    def _group(self) -> Group:
        return None if self.size == 1 else self.group or distributed.group.WORLD

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

    def from_rank_zero(self, value: Any) -> Any:
        """The JSON value of rank 0; those of the other ranks are ignored."""
        return broadcast_json(value, 0, self._group)


Group = ProcessGroup | None
"""The processes that exchange numbers and text; None for a process alone, which gets back what it gives."""


def broadcast_numbers(numbers: Tensor, source: int, group: Group) -> Tensor:
    """The numbers of rank `source` of the group, as doubles; the other ranks pass as many, which are ignored."""
    shared = _doubles(numbers)
    if group is not None:
        distributed.broadcast(shared, group=group, group_src=source)
    return shared


def sum_of_numbers(numbers: Tensor, group: Group) -> Tensor:
    total = _doubles(numbers)
    if group is not None:
        distributed.all_reduce(total, group=group)
    return total


def gather_numbers(numbers: Tensor, group: Group) -> Tensor:
    """One row per rank; all ranks pass equally many numbers."""
    own = _doubles(numbers)
    if group is None:
        return own.unsqueeze(0)
    rows = own.new_empty(distributed.get_world_size(group), len(own))
    distributed.all_gather(list(rows), own, group=group)
    return rows


def broadcast_tensor(tensor: Tensor | None, source: int, group: Group) -> Tensor:
    """The tensor of rank `source` of the group, on the CPU; the other ranks pass None."""
    header = None if tensor is None else [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    dtype, shape = broadcast_json(header, source, group)
    own = torch.empty(shape, dtype=getattr(torch, dtype)) if tensor is None else tensor.to("cpu").contiguous()
    if group is not None:
        distributed.broadcast(own.view(-1), group=group, group_src=source)
    return own


def broadcast_json(value: Any, source: int, group: Group) -> Any:
    """The value of rank `source` of the group; the values that other ranks pass are ignored."""
    if group is None:
        return value
    text = encode(value)
    length = int(broadcast_numbers(torch.tensor([len(text)]), source, group))
    if distributed.get_rank(group) != source:
        text = torch.empty(length, dtype=torch.uint8)
    distributed.broadcast(text, group=group, group_src=source)
    return decode(text)


def gather_json(value: Any, group: Group) -> list[Any]:
    """The values of all ranks of the group, by rank."""
    if group is None:
        return [value]
    text = encode(value)
    lengths = [int(length) for length in gather_numbers(torch.tensor([len(text)]), group)]
    # all_gather wants rows of one length.
    padded = torch.cat([text, text.new_zeros(max(lengths) - len(text))])
    rows = padded.new_empty(len(lengths), len(padded))
    distributed.all_gather(list(rows), padded, group=group)
    return [decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def encode(value: Any) -> Tensor:
    """A JSON value as bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decode(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))


def _doubles(numbers: Tensor) -> Tensor:
    """A copy, because collectives write to their argument."""
    return numbers.to("cpu", torch.float64, copy=True)
