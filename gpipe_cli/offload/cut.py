"""A sequence cut into slices whose parameters live on a tier."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.offload.slice import Slice
from gpipe_cli.offload.tiers import Tier
from gpipe_cli.pipeline.tied import TiedParameters

__all__ = ["Parameters", "parameters_of"]


@final
@dataclass(frozen=True)
class Parameters:
    """Whose parameters are whose."""

    slices: list[list[nn.Parameter]]
    """Those only one layer has."""
    shared: dict[nn.Parameter, int]
    """Those several layers have, each with the first slice that has it: they cannot come and go with one, so they
    stay."""

    def keep_shared(
        self, devices: Sequence[torch.device], value_of: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Take what is shared to the device of the first slice that has it; devices are given out in turn."""
        for parameter, slice in self.shared.items():
            value = parameter.data if value_of is None else value_of(parameter.data)
            parameter.data = value.to(devices[slice % len(devices)])

    def on(self, tier: Tier, value_of: Callable[[Tensor], Tensor] | None = None) -> dict[int, Slice]:
        """Take the parameters to the tier, slice by slice."""
        give = (lambda tensor: tensor) if value_of is None else value_of
        return {index: Slice(tier, own, give) for index, own in enumerate(self.slices)}


def parameters_of(module: nn.Sequential, balance: Sequence[int]) -> Parameters:
    layers = list(module)
    ends = list(accumulate(balance))
    # Of each mini-batch every layer has an alias of its own, made before any slice is there and added up after the
    # last has gone: so they stay even where all these layers are in one slice.
    shared = {one: bisect_right(ends, users[0]) for one, users in TiedParameters(layers).users}
    return Parameters(
        [
            list(
                dict.fromkeys(
                    one for layer in layers[begin:end] for one in layer.parameters() if one not in shared
                )
            )
            for begin, end in pairwise([0, *ends])
        ],
        shared,
    )
