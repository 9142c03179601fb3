"""Which memory a tensor lies in: the address of its storage object, which torch keeps private.

`data_ptr()` would not do: on the meta device it is 0 for all.
"""

from __future__ import annotations

from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """Equal for a tensor and its views; another tensor may get it once they are all gone."""
    return int(tensor.untyped_storage()._cdata)
