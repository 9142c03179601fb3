"""Computation of a useful size for a device of unknown speed: long against starting a kernel, short for a check."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpipe_cli.check.timing import median_seconds

WIDTHS = (128, 256, 512, 1024, 2048, 4096)
LONG_ENOUGH = 1e-3
"""Seconds of one product of square matrices; starting a kernel takes about 1e-5."""


def suitable_width(device: torch.device) -> int:
    """The smallest width whose product takes long enough, or the largest one."""
    for width in WIDTHS:
        if median_seconds(_product(device, width), [device], repeats=3) >= LONG_ENOUGH:
            break
    return width


def square_product(device: torch.device) -> Callable[[], Tensor]:
    """A function that multiplies two matrices of suitable width."""
    return _product(device, suitable_width(device))


def heavy_model(width: int, layers: int) -> nn.Sequential:
    """Linear layers of equal cost, so that any equal division is balanced."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _product(device: torch.device, width: int) -> Callable[[], Tensor]:
    left, right = (torch.ones(width, width, device=device) for _ in range(2))
    return lambda: left @ right
