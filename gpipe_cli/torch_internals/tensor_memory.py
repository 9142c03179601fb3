"""The storage and the version counters of tensors."""

from __future__ import annotations

from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """A number shared by a tensor and its views. Another tensor may get it once they are all freed."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
