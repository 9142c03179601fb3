"""Models larger than their device: parameters live in host memory or on disk, and visit the device slice by slice.

from gpipe_cli.offload import OffloadModel
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_cli import lazy_attributes

if TYPE_CHECKING:
    from gpipe_cli.offload.offloaded_pipe import OffloadModel

__all__ = ["OffloadModel"]

__getattr__ = lazy_attributes(__name__, {"OffloadModel": "offloaded_pipe"})
