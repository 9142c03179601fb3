"""Numbers and text that the processes of a group share, as tensors on the CPU.

They travel over gloo whatever the device of the model is, so a process reads them without waiting for its device.
Nothing is ever pickled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


def share_numbers(numbers: Tensor, source: int, group: ProcessGroup) -> Tensor:
    """The numbers of rank `source` of the group, as doubles; the other ranks pass as many, which are ignored."""
    shared = _doubles(numbers)
    distributed.broadcast(shared, group=group, group_src=source)
    return shared


def sum_of_numbers(numbers: Tensor, group: ProcessGroup) -> Tensor:
    total = _doubles(numbers)
    distributed.all_reduce(total, group=group)
    return total


def gather_numbers(numbers: Tensor, group: ProcessGroup) -> Tensor:
    """One row per rank; all ranks pass equally many numbers."""
    own = _doubles(numbers)
    rows = own.new_empty(distributed.get_world_size(group), len(own))
    distributed.all_gather(list(rows), own, group=group)
    return rows


def share_tensor(tensor: Tensor | None, source: int, group: ProcessGroup) -> Tensor:
    """The tensor of rank `source` of the group, on the CPU; the other ranks pass None."""
    header = None if tensor is None else [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    dtype, shape = share_json(header, source, group)
    own = torch.empty(shape, dtype=getattr(torch, dtype)) if tensor is None else tensor.to("cpu").contiguous()
    distributed.broadcast(own.view(-1), group=group, group_src=source)
    return own


def share_json(value: Any, source: int, group: ProcessGroup) -> Any:
    """The value of rank `source` of the group; the values that other ranks pass are ignored."""
    text = encode(value)
    length = int(share_numbers(torch.tensor([len(text)]), source, group))
    if distributed.get_rank(group) != source:
        text = torch.empty(length, dtype=torch.uint8)
    distributed.broadcast(text, group=group, group_src=source)
    return decode(text)


def gather_json(value: Any, group: ProcessGroup) -> list[Any]:
    """The values of all ranks of the group, by rank."""
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
