"""The layers of this process, by its place in the group `pipe`."""

from __future__ import annotations

from typing import TypeVar

from torch import distributed, nn

from gpipe_cli.distributed.groups import PIPE, get_group
from gpipe_cli.sequential import by_list

__all__ = ["partition_uniform"]

Layers = TypeVar("Layers", list[nn.Module], nn.Sequential)


def partition_uniform(layers: Layers) -> Layers:
    """This process's share of the layers when all have as many, or differ by one: 11 over 4 are 3, 3, 3, 2."""
    group = get_group(PIPE)
    return by_list.partition_uniform(layers, distributed.get_world_size(group), distributed.get_rank(group))
