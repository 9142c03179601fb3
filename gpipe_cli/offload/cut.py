"""A sequence cut into slices whose parameters live on a tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.offload.slice import Slice
from gpipe_cli.offload.tiers import Tier

__all__ = ["Parameters", "parameters_of"]


@final
@dataclass(frozen=True)
class Parameters:
    """Whose parameters are whose."""

    slices: list[list[nn.Parameter]]
    """Those only one slice has."""
    shared: dict[nn.Parameter, int]
    """Those several slices have, each with the first of them: they cannot come and go with one, so they stay."""

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
    parts = [
        list(dict.fromkeys(one for layer in layers[begin:end] for one in layer.parameters()))
        for begin, end in pairwise([0, *accumulate(balance)])
    ]
    holders = Counter(one for part in parts for one in part)
    return Parameters(
        [[one for one in part if holders[one] == 1] for part in parts],
        {
            one: next(index for index, part in enumerate(parts) if one in set(part))
            for one, count in holders.items()
            if count > 1
        },
    )
