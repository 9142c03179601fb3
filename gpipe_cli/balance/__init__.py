"""Ways to divide layers among partitions, one file per method.

    from gpipe_cli.balance import balance_by_size, balance_by_time

The names are given lazily: the solver is used where torch is not imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_cli.balance.size import balance_by_size
    from gpipe_cli.balance.time import balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{name.removeprefix('balance_by_')}"), name)
