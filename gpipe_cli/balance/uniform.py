"""The same number of layers for every partition; the remainder is spread evenly."""

from __future__ import annotations


def balance(layer_count: int, partitions: int) -> list[int]:
    """11 layers over 4 partitions are 3, 3, 3, 2."""
    share, rest = divmod(layer_count, partitions)
    return [share + (index < rest) for index in range(partitions)]
