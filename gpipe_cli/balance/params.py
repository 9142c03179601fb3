"""Balance by parameters: the partition with most of them has as few as possible."""

from __future__ import annotations

from torch import nn

from gpipe_cli.balance.solver import solve


def balance(module: nn.Sequential, partitions: int) -> list[int]:
    return solve([sum(one.numel() for one in layer.parameters()) for layer in module], partitions).balance
