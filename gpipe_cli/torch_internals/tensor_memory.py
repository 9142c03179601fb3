"""The storage and the version counters of tensors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """A number shared by a tensor and its views. Another tensor may get it once they are all freed."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@functools.cache
def exchanges_memory(device: torch.device) -> bool:
    """Whether `tensor.data = other` may replace host memory by memory of the device, and back.

    Not for devices whose kind torch does not know itself: those of PrivateUse1, such as NPUs.
    """
    return bool(torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device)))
