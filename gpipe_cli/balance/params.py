"""Balance by parameters: the partition with most of them has as few as possible."""

from __future__ import annotations

from torch import nn

from gpipe_cli.balance.memory import Memory
from gpipe_cli.balance.result import Balanced


def balance(module: nn.Sequential, partitions: int, within: Memory | None = None) -> Balanced:
    costs = [sum(one.numel() for one in layer.parameters()) for layer in module]
    return Balanced.by(costs, partitions, "parameters", within)
