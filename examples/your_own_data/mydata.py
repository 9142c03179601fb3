"""Data of your own for gpipe: docs/how-to/your-own-data.md trains on it.

gpipe train model=mlp data._target_=mydata.build allow=[mydata]
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data


class Waves:
    """A map-style dataset: sines with noise, whose class is their frequency."""

    def __init__(self, count: int, seed: int, points: int = 64) -> None:
        self._count, self._seed = count, seed
        self._time = torch.linspace(0, 6.28, points)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # The sample is a function of its index, so it does not matter who asks for it, or when.
        random = torch.Generator().manual_seed(self._seed + index)
        target = index % 3
        noise = 0.3 * torch.randn(len(self._time), generator=random)
        return torch.sin((target + 1) * self._time) + noise, target


def build(count: int = 600, workers: int = 0) -> Data:
    """What `data._target_` names: samples to train on, samples held out, and what a model has to know of them."""
    return Data(
        train=Waves(count, seed=0),
        test=Waves(count // 4, seed=1_000_000),
        classes=3,
        shape=(64,),
        workers=workers,
    )
