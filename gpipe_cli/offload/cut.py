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
    shared: list[nn.Parameter]
    """Those several slices have: they cannot come and go with one of them, so they stay."""

    def keep_shared(
        self,
        device_of: Callable[[nn.Parameter], torch.device],
        value_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        for parameter in self.shared:
            value = parameter.data if value_of is None else value_of(parameter.data)
            parameter.data = value.to(device_of(parameter))

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
        [one for one, count in holders.items() if count > 1],
    )
