"""The same number of layers for every partition; the remainder is spread evenly."""

from __future__ import annotations

from gpipe_cli.balance.result import Balanced


def balance(layer_count: int, partitions: int) -> Balanced:
    """11 layers over 4 partitions are 3, 3, 3, 2."""
    share, rest = divmod(layer_count, partitions)
    return Balanced([share + (index < rest) for index in range(partitions)], [1] * layer_count, "layers")
