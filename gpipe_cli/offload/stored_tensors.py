"""Tensors stored together in one region of a tier.

Each tensor begins at a multiple of `ALIGNMENT` bytes, as in memory that torch allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gpipe_cli.offload.tiers import Tier
from gpipe_cli.torch_internals.tensors import ALIGNMENT, exchanges_memory, is_dense, storage_of

HOST = torch.device("cpu")


@final
@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor lies in a row of bytes, and its shape there."""

    begin: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int

    def view(self, memory: Tensor) -> Tensor:
        """The tensor, as a view of the bytes in `memory`."""
        flat = memory[self.begin : self.begin + self.nbytes].view(self.dtype)
        return flat.as_strided(self.size, self.stride)

    def placeholder(self, device: torch.device) -> Tensor:
        return placeholder(self.dtype, self.size, device)


def placeholder(dtype: torch.dtype, size: Sequence[int], device: torch.device) -> Tensor:
    """A tensor that takes no memory: one NaN, expanded, which no weight can be."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(size)


@final
class Layout:
    """Slots for tensors like those given, in their order."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.slots: list[TensorSlot] = []
        end = 0
        for tensor in tensors:
            # Strides decide which kernels run, so dense tensors keep theirs; one with holes is stored without them.
            dense = tensor.is_contiguous() or is_dense(tensor)
            stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
            slot = TensorSlot(end, tensor.dtype, tuple(tensor.shape), tuple(stride), tensor.nbytes)
            self.slots.append(slot)
            end += padded(slot.nbytes)
        self.nbytes = end


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as a row of bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@final
class StoredTensors:
    """Space on a tier for tensors like those given; `put` stores their values."""

    def __init__(self, tier: Tier, tensors: Sequence[Tensor]) -> None:
        self.layout = Layout(tensors)
        self.region = tier.region(self.layout.nbytes)
        memory = self.region.memory
        self._slots: dict[int, TensorSlot] = {}
        self.resting_tensors: list[Tensor] = []
        """What represents each tensor while it is not on its device: a view of host memory, or a placeholder."""
        for slot, tensor in zip(self.layout.slots, tensors, strict=True):
            if memory is not None and exchanges_memory(tensor.device):
                self.resting_tensors.append(slot.view(memory))
                continue
            device = HOST if exchanges_memory(tensor.device) else tensor.device
            self.resting_tensors.append(slot.placeholder(device))
            self._slots[storage_of(self.resting_tensors[-1])] = slot

    @property
    def has_placeholders(self) -> bool:
        return bool(self._slots)

    def put(self, index: int, value: Tensor) -> None:
        """Store a value, from whichever device it is on; the host has it on return."""
        slot = self.layout.slots[index]
        dense = value if value.stride() == slot.stride else value.contiguous()
        self.region.write(slot.begin, as_bytes(dense.detach().cpu()))

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors, in memory that their bytes were loaded to."""
        return [slot.view(memory) for slot in self.layout.slots]

    def get(self, resting: Tensor) -> Tensor | None:
        """Read the value of one of the placeholders; None for any other tensor."""
        slot = self._slots.get(storage_of(resting))
        if slot is None:
            return None
        value = torch.empty(slot.nbytes, dtype=torch.uint8)
        self.region.read(slot.begin, value)
        return value.view(slot.dtype).as_strided(slot.size, slot.stride)
