"""gpipe: pipeline-parallel PyTorch from declarative configs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_cli.pipeline.context import current_microbatch, is_checkpointing, is_recomputing
    from gpipe_cli.pipeline.gpipe import GPipe
    from gpipe_cli.pipeline.layer_logging import register_layer_logging_hooks
    from gpipe_cli.pipeline.microbatch import NoChunk

__version__ = "1.0.0"
__all__ = [
    "GPipe",
    "NoChunk",
    "__version__",
    "current_microbatch",
    "is_checkpointing",
    "is_recomputing",
    "register_layer_logging_hooks",
]


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that imports public names on first use (PEP 562), so that importing it imports no torch.

    modules: maps each public name to the module that defines it, below the package.
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return __getattr__


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
