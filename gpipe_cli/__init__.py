"""gpipe: pipeline-parallel PyTorch from declarative configs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_cli.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from gpipe_cli.pipeline.context import current_microbatch, is_checkpointing, is_recomputing
    from gpipe_cli.pipeline.gpipe import GPipe
    from gpipe_cli.pipeline.layer_logging import register_layer_logging_hooks
    from gpipe_cli.pipeline.microbatch import NoChunk

__version__ = "0.1.0"
__all__ = [
    "GPipe",
    "NoChunk",
    "__version__",
    "current_microbatch",
    "is_checkpointing",
    "is_recomputing",
    "register_layer_logging_hooks",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "GPipe": "pipeline.gpipe",
        "NoChunk": "pipeline.microbatch",
        "current_microbatch": "pipeline.context",
        "is_checkpointing": "pipeline.context",
        "is_recomputing": "pipeline.context",
        "register_layer_logging_hooks": "pipeline.layer_logging",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
