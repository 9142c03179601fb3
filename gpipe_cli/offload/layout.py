"""Where tensors lie in a row of bytes, each at a multiple of 64 so that kernels find what they find in a plain model.

Other alignment would mean other vector instructions at the edges, and other bits. Knows nothing of where the bytes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gpipe_cli.pipeline.aliasing import is_dense
from gpipe_cli.sequential.meta_clone import placeholder

__all__ = ["ALIGNMENT", "Layout", "Place", "as_bytes", "padded"]

ALIGNMENT = 64


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place, and what it looks like there."""

    begin: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in the bytes that `memory` is."""
        flat = memory[self.begin : self.begin + self.nbytes].view(self.dtype)
        return flat.as_strided(self.size, self.stride)

    def placeholder(self) -> Tensor:
        """A tensor that looks the same and takes no memory, filled with a value that cannot pass for a weight."""
        return placeholder(self.size, self.dtype, float("nan") if self.dtype.is_floating_point else 0)


@final
class Layout:
    """Places for tensors like those given, in their order."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.places: list[Place] = []
        end = 0
        for tensor in tensors:
            dense = tensor.is_contiguous() or is_dense(tensor)
            stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
            place = Place(end, tensor.dtype, tuple(tensor.shape), tuple(stride), tensor.nbytes)
            self.places.append(place)
            end += padded(place.nbytes)
        self.nbytes = end


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as a row of bytes; for a tensor without holes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
