"""Models larger than their device: kept elsewhere, and brought in slice by slice.

from gpipe_cli.offload import OffloadModel
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_cli.offload.model import OffloadModel

__all__ = ["OffloadModel"]


def __getattr__(name: str) -> Any:
    # Given lazily: whoever tells of transfers needs no model.
    if name == "OffloadModel":
        from gpipe_cli.offload.model import OffloadModel

        return OffloadModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
