"""Balance by parameters: the partition with the most parameters has as few as possible."""

from __future__ import annotations

from torch import nn

from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.result import BalanceResult
from gpipe_cli.balance.solver import require_layers


def balance_by_params(module: nn.Sequential, partitions: int) -> list[int]:
    """Layers per partition for `GPipe(module, balance)`. Nothing runs, so there is no sample."""
    require_layers(len(module), partitions)
    return balance(module, partitions).layers


def balance(module: nn.Sequential, partitions: int, within: MemoryObjective | None = None) -> BalanceResult:
    costs = [sum(parameter.numel() for parameter in layer.parameters()) for layer in module]
    return BalanceResult.by(costs, partitions, "parameters", within)
