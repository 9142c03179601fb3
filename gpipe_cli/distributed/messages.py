"""Sends numbers, text and tensors between the processes of a group.

Tensors travel on the device that the group's backend needs, everything else as bytes or doubles in tensors. Nothing
is ever pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Work


@final
@dataclass(frozen=True, eq=False)
class Sending:
    """A message that is being sent. Its memory must stay allocated until it has arrived."""

    work: Work
    message: Tensor


def share_numbers(numbers: Tensor, source: int, group: ProcessGroup, device: torch.device) -> Tensor:
    """The numbers of rank `source` of the group, as doubles; the other ranks pass as many, which are ignored."""
    moved = numbers.to(device, torch.float64)
    distributed.broadcast(moved, group=group, group_src=source)
    return moved.cpu()


def sum_of_numbers(numbers: Tensor, group: ProcessGroup, device: torch.device) -> Tensor:
    moved = numbers.to(device, torch.float64)
    distributed.all_reduce(moved, group=group)
    return moved.cpu()


def gather_numbers(numbers: Tensor, group: ProcessGroup, device: torch.device) -> Tensor:
    """One row per rank; all ranks pass equally many numbers."""
    moved = numbers.to(device, torch.float64)
    rows = moved.new_empty(distributed.get_world_size(group), len(numbers))
    distributed.all_gather(list(rows), moved, group=group)
    return rows.cpu()


def share_json(value: Any, source: int, group: ProcessGroup, device: torch.device) -> Any:
    """The value of rank `source` of the group; the values that other ranks pass are ignored."""
    text = _bytes(value)
    length = int(share_numbers(torch.tensor([len(text)]), source, group, device))
    text = text.to(device) if distributed.get_rank(group) == source else _empty(length, device)
    distributed.broadcast(text, group=group, group_src=source)
    return _value(text)


def send_tensors(
    tensors: Mapping[str, Tensor], notes: Any, to: int, group: ProcessGroup, device: torch.device
) -> None:
    """Send tensors by name, and a JSON value, to rank `to` of the group."""
    for sending in begin_sending(tensors, notes, to, group, device):
        sending.work.wait()


def begin_sending(
    tensors: Mapping[str, Tensor], notes: Any, to: int, group: ProcessGroup, device: torch.device
) -> list[Sending]:
    """The same without waiting: two neighbours that send to each other and wait would deadlock."""
    table = [[name, _dtype_name(tensor), list(tensor.shape)] for name, tensor in tensors.items()]
    text = _bytes([table, notes]).to(device)
    length = torch.tensor([len(text)], device=device)
    # The receiver allocates by the length, reads the table, then takes the tensors in its order: messages between two
    # ranks arrive in the order of sending. Both sides leave out empty tensors.
    messages = [length, text, *(_raw(tensor.to(device)) for tensor in tensors.values() if tensor.numel())]
    return [
        Sending(_begun(distributed.isend(message, group=group, group_dst=to)), message)
        for message in messages
    ]


def receive_tensors(source: int, group: ProcessGroup, device: torch.device) -> tuple[dict[str, Tensor], Any]:
    """What rank `source` sends with `send_tensors`; the tensors are on the CPU."""
    received, notes = receive_on_device(source, group, device)
    return {name: tensor.cpu() for name, tensor in received.items()}, notes


def receive_on_device(
    source: int, group: ProcessGroup, device: torch.device
) -> tuple[dict[str, Tensor], Any]:
    """The same, with the tensors on the device."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    distributed.recv(length, group=group, group_src=source)
    text = _empty(int(length), device)
    distributed.recv(text, group=group, group_src=source)
    table, notes = _value(text)
    received = {}
    for name, dtype, shape in table:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if tensor.numel():
            distributed.recv(_raw(tensor), group=group, group_src=source)
        received[name] = tensor
    return received, notes


def _begun(work: Work | None) -> Work:
    assert work is not None, "this process is in the group"
    return work


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: backends do not support every dtype."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(text: Tensor) -> Any:
    return json.loads(bytes(text.cpu().tolist()))


def _empty(length: int, device: torch.device) -> Tensor:
    return torch.empty(length, dtype=torch.uint8, device=device)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
