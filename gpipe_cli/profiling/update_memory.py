"""The memory that an update needs in addition to parameters and gradients, found by trying the optimizer out.

Optimizers compute in temporaries, and the first update creates their state. Foreach kernels, the default on most
accelerators, have temporaries as large as all parameters together, so the trial runs on the device of the training.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import nn

from gpipe_cli.profiling.optimizer_state import MakeOptimizer
from gpipe_cli.torch_internals.live_bytes import LiveBytes

_SIDE = 64
"""Of the parameter to try: large enough that the scalars of an optimizer do not matter."""


def update_bytes(make: MakeOptimizer, parameters: Iterable[nn.Parameter], device: torch.device) -> list[int]:
    """For each parameter its share of an update of all of them at once, the first update included."""

    @cache
    def factor(dtype: torch.dtype) -> float:
        return _update_factor(make, dtype, device)

    return [
        int(factor(parameter.dtype) * parameter.nbytes) if parameter.requires_grad else 0
        for parameter in parameters
    ]


def _update_factor(make: MakeOptimizer, dtype: torch.dtype, device: torch.device) -> float:
    parameter = nn.Parameter(torch.ones(_SIDE, _SIDE, dtype=dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([("", parameter)])
    peaks: list[int] = []
    for _ in range(2):
        with LiveBytes() as live:
            optimizer.step()
        peaks.append(live.peak)
    return max(peaks) / int(parameter.nbytes)
