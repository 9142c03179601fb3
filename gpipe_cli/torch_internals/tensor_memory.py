"""The storage and the version counters of tensors."""

from __future__ import annotations

from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """Equal for a tensor and its views; another tensor may get it once they are all gone."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
