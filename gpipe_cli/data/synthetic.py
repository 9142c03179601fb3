"""Made-up data of any shape: every class has a pattern, every sample is its pattern and noise.

A network can learn it, so a loss that does not fall is a bug. Samples are computed when asked for, from
little memory, each a pure function of (seed, index).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, scaled
from gpipe_cli.data.keys import check_common_keys
from gpipe_cli.data.seeds import generator_for
from gpipe_cli.errors import ConfigError
from gpipe_cli.values import check_whole_number

_WINDOWS = 2**16  # how many different noises there are
_STRIDE = 40503  # odd, so consecutive samples reach every window before one comes again
_COARSE = 4  # side of a pattern before it is scaled up: detail would not survive a network's pooling


def build(
    shape: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    length: int = 1024,
    seed: int = 0,
    size: int | None = None,
    workers: int = 0,
    timeout: float | None = None,
) -> Data:
    """`length` samples to train on and a quarter as many held out; `size` replaces the sides of an image."""
    check_common_keys(size, workers, timeout)
    check_whole_number("data.classes", classes, least=1)
    check_whole_number("data.length", length, least=1)
    shape = _checked_shape(shape, size)
    patterns, noise = _patterns(shape, classes, seed), _noise(shape, seed)
    train = SyntheticSamples(patterns, noise, first=0, length=length)
    test = SyntheticSamples(patterns, noise, first=length, length=max(1, length // 4))
    return Data(train, test, classes=classes, shape=shape, workers=workers, timeout=timeout)


@final
class SyntheticSamples:
    def __init__(self, patterns: Tensor, noise: Tensor, first: int, length: int) -> None:
        self._patterns, self._noise = patterns, noise
        self._first, self._length = first, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return inputs[0], targets[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        places = indices + self._first
        targets = places % len(self._patterns)
        windows = self._noise.unfold(0, self._patterns[0].numel(), 1)
        inputs = windows.index_select(0, places * _STRIDE % _WINDOWS).view(-1, *self._patterns.shape[1:])
        return inputs.add_(self._patterns.index_select(0, targets)), targets


def _checked_shape(shape: Sequence[int], size: int | None) -> tuple[int, ...]:
    if isinstance(shape, (str, int)) or not shape:
        raise ConfigError(f"data.shape={shape}: must be a list of whole numbers, such as [3,32,32]")
    for side in shape:
        check_whole_number("data.shape", side, least=1)
    if size is None:
        return tuple(shape)
    if len(shape) != 3:
        raise ConfigError(f"data.size={size}: only images have a size, and data.shape is {list(shape)}")
    return (shape[0], size, size)


def _patterns(shape: tuple[int, ...], classes: int, seed: int) -> Tensor:
    generator = generator_for(seed, "patterns")
    if len(shape) not in (3, 4):
        return torch.randn(classes, *shape, generator=generator)
    channels, *frames, height, width = shape
    coarse = torch.randn(classes, channels * prod(frames), _COARSE, _COARSE, generator=generator)
    return scaled(coarse, height, width).view(classes, *shape)


def _noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """One long strip: each sample looks at it through a window of its own."""
    return torch.randn(prod(shape) + _WINDOWS - 1, generator=generator_for(seed, "noise")).mul_(0.5)
