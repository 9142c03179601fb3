"""A model over several processes, from Python: one process per partition, replicated if there are more processes.

from gpipe_cli.distributed import forward_backward, partition_uniform, setup_distributed, tpc
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_cli.distributed.tpc import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public names on first use, because they import torch; `__all__` is theirs too."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("gpipe_cli.distributed.tpc"), name)
