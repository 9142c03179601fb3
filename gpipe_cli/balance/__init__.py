"""Ways to divide layers among partitions, one file per method.

from gpipe_cli.balance import balance_by_size, balance_by_time
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_cli import lazy_attributes

if TYPE_CHECKING:
    from gpipe_cli.balance.params import balance_by_params
    from gpipe_cli.balance.size import balance_by_size
    from gpipe_cli.balance.time import balance_by_time

__all__ = ["balance_by_params", "balance_by_size", "balance_by_time"]

# Lazy: the solver next to these runs where torch is not imported.
__getattr__ = lazy_attributes(
    __name__, {"balance_by_params": "params", "balance_by_size": "size", "balance_by_time": "time"}
)
