"""A sequence cut by a balance: the same layers under the same names, as modules and as partitions to be run.

Knows nothing of how they are run, or of where their parameters are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import nn

from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.skip.layout import skip_layout

__all__ = ["PartitionView", "make_partitions", "make_views", "place_buffers"]


@final
class PartitionView(nn.Sequential):
    """Some layers of the sequence, under the names they have there."""

    def __init__(self, named: list[tuple[str, nn.Module]], layers: tuple[Layer, ...]) -> None:
        super().__init__(OrderedDict(named))
        self.layer_names = tuple(layer.name for layer in layers)
        """The names for people, which may hold dots, as no child's name can."""


def make_views(module: nn.Sequential, layers: Sequence[Layer], balance: Sequence[int]) -> nn.ModuleList:
    named = list(module.named_children())
    return nn.ModuleList(
        PartitionView(named[begin:end], tuple(layers[begin:end]))
        for begin, end in pairwise([0, *accumulate(balance)])
    )


def make_partitions(
    views: nn.ModuleList, layers: Sequence[Layer], devices: Sequence[torch.device]
) -> list[Partition]:
    """One for each view; devices are given out in turn."""
    layout = skip_layout(list(views))
    borders = pairwise([0, *accumulate(len(view) for view in views)])  # type: ignore[arg-type]
    return [
        Partition(
            index=index,
            layers=tuple(layers[begin:end]),
            device=devices[index % len(devices)],
            receives=layout.receives[index],
            sends=layout.sends[index],
            others=[view for view in views if view is not views[index]],
        )
        for index, (begin, end) in enumerate(borders)
    ]


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move what is no parameter; for a module whose parameters come and go."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(device))
