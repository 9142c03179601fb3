"""Give every partition the same number of layers; the remainder is spread evenly."""

from __future__ import annotations

from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.result import BalanceResult


def balance(layer_count: int, partitions: int, within: MemoryObjective | None = None) -> BalanceResult:
    """11 layers over 4 partitions give 3, 3, 3, 2; only a memory limit makes it less even."""
    share, rest = divmod(layer_count, partitions)
    even = [share + (index < rest) for index in range(partitions)]
    if within is None or within.fits(even):
        return BalanceResult.of(even, [1] * layer_count, "layers")
    return BalanceResult.by([1] * layer_count, partitions, "layers", within)
