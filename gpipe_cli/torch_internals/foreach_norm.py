"""The norms of many tensors in one call, where torch has no public name for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def foreach_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The 2-norm of each tensor. On the CPU, the bits of torch.linalg.vector_norm, which torch calls for each."""
    norms: tuple[Tensor, ...] = tuple(torch._foreach_norm(list(tensors)))
    return norms
