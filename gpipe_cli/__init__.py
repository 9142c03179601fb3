"""gpipe: pipeline-parallel PyTorch from declarative configs.

The public names are given lazily (PEP 562): importing the package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gpipe_cli.version import VERSION as __version__

if TYPE_CHECKING:
    from gpipe_cli.pipeline.context import current_microbatch, is_checkpointing, is_recomputing
    from gpipe_cli.pipeline.gpipe import GPipe
    from gpipe_cli.pipeline.layer_logging import register_layer_logging_hooks
    from gpipe_cli.pipeline.microbatch import NoChunk

__all__ = [
    "GPipe",
    "NoChunk",
    "__version__",
    "current_microbatch",
    "is_checkpointing",
    "is_recomputing",
    "register_layer_logging_hooks",
]

_HOMES = {
    "GPipe": "gpipe_cli.pipeline.gpipe",
    "NoChunk": "gpipe_cli.pipeline.microbatch",
    "current_microbatch": "gpipe_cli.pipeline.context",
    "is_checkpointing": "gpipe_cli.pipeline.context",
    "is_recomputing": "gpipe_cli.pipeline.context",
    "register_layer_logging_hooks": "gpipe_cli.pipeline.layer_logging",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
