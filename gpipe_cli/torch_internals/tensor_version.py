"""How often a tensor was written in place: autograd's version counter, which torch keeps private."""

from __future__ import annotations

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
