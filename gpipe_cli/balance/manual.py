"""A balance given by hand."""

from __future__ import annotations

from gpipe_cli.balance.result import BalanceResult
from gpipe_cli.errors import ConfigError


def balance(layer_count: int, layers: list[int]) -> BalanceResult:
    """`layers` as given, if they cover the model."""
    if sum(layers) != layer_count:
        raise ConfigError(
            f"balance.layers={layers}: covers {sum(layers)} layers, the model has {layer_count}; "
            f"the entries must add up to that"
        )
    return BalanceResult.of(layers, [1] * layer_count, "layers")
