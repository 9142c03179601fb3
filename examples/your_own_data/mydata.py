"""An example of your own data for gpipe; docs/how-to/your-own-data.md trains on it.

gpipe train model=mlp data=mydata:build
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data


class Waves:
    """A map-style dataset of noisy sine waves; the class of a wave is its frequency."""

    def __init__(self, count: int, seed: int, points: int = 64) -> None:
        self._count, self._seed = count, seed
        self._time = torch.linspace(0, 6.28, points)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # The sample depends only on its index, so any worker can load it at any time.
        generator = torch.Generator().manual_seed(self._seed + index)
        target = index % 3
        noise = 0.3 * torch.randn(len(self._time), generator=generator)
        return torch.sin((target + 1) * self._time) + noise, target


def build(count: int = 600) -> Data:
    """The function that `data._target_` names: training and held-out samples, and what a model must know of them."""
    return Data(
        train=Waves(count, seed=0),
        test=Waves(count // 4, seed=1_000_000),
        classes=3,
        shape=(64,),
        class_names=("slow", "medium", "fast"),  # optional: what predictions are called
    )
