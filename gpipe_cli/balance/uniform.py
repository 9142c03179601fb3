"""The same number of layers for every partition; the remainder is spread evenly."""

from __future__ import annotations

from gpipe_cli.errors import ConfigError


def balance(layer_count: int, partitions: int) -> list[int]:
    """11 layers over 4 partitions are 3, 3, 3, 2."""
    if partitions > layer_count:
        raise ConfigError(
            f"partitions={partitions}: the model has only {layer_count} layers; give at most that many"
        )
    share, rest = divmod(layer_count, partitions)
    return [share + (index < rest) for index in range(partitions)]
