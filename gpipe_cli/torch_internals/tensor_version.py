"""How often a tensor was written in place: autograd's version counter, which torch keeps private."""

from __future__ import annotations

from torch import Tensor

__all__ = ["version_of"]


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
