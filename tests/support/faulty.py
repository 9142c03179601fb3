"""A model and samples that fail on demand; tests name them on the command line.

A resumed run cannot change its model, so the fault is not a configuration key: a process sets the two hooks below.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpipe_cli.data.datasets import Data

in_layer: Callable[[Tensor], Tensor] = lambda input: input  # noqa: E731 - to be replaced
in_sample: Callable[[int], Tensor | int] = lambda index: index % 3  # noqa: E731
"""Gives the label."""


class Faulty(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return in_layer(input)


def model(num_classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width),
        nn.BatchNorm1d(width),
        nn.Dropout(0.2),
        nn.Linear(width, width),
        Faulty(),
        nn.Linear(width, num_classes),
    )


class Samples:
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor | int]:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), in_sample(index)


def data(length: int = 24, workers: int = 0, timeout: float = 120) -> Data:
    return Data(
        Samples(length), Samples(min(6, length)), classes=3, shape=(8,), workers=workers, timeout=timeout
    )
