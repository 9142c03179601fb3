"""Generated data of any shape: each class has a pattern, and each sample is its class's pattern plus noise.

A network can learn it, so a loss that does not fall is a bug. Each sample is a pure function of (seed, index) and is
computed when it is needed, from little memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, check_common_keys, generator_for, resize
from gpipe_cli.errors import ConfigError
from gpipe_cli.values import check_whole_number

_WINDOWS = 2**16  # number of different noises
_STRIDE = 40503  # odd, so consecutive samples use every window before any repeats
_COARSE = 4  # side of a pattern before scaling: finer detail would not survive a network's pooling


def build(
    shape: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    length: int = 1024,
    seed: int = 0,
    size: int | None = None,
    workers: int = 0,
    timeout: float | None = None,
) -> Data:
    """Generate `length` samples to train on and a quarter as many held out; `size` replaces height and width."""
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
        positions = indices + self._first
        targets = positions % len(self._patterns)
        windows = self._noise.unfold(0, self._patterns[0].numel(), 1)
        inputs = windows.index_select(0, positions * _STRIDE % _WINDOWS).view(-1, *self._patterns.shape[1:])
        return inputs.add_(self._patterns.index_select(0, targets)), targets


def _checked_shape(shape: Sequence[int], size: int | None) -> tuple[int, ...]:
    if isinstance(shape, (str, int)) or not shape:
        raise ConfigError(f"data.shape={shape}: must be a list of whole numbers, such as [3,32,32]")
    for side in shape:
        check_whole_number("data.shape", side, least=1)
    if size is None:
        return tuple(shape)
    if len(shape) != 3:
        raise ConfigError(
            f"data.size={size}: applies to images only, and data.shape is {list(shape)}; leave it out"
        )
    return (shape[0], size, size)


def _patterns(shape: tuple[int, ...], classes: int, seed: int) -> Tensor:
    generator = generator_for(seed, "patterns")
    if len(shape) not in (3, 4):
        return torch.randn(classes, *shape, generator=generator)
    channels, *frames, height, width = shape
    coarse = torch.randn(classes, channels * prod(frames), _COARSE, _COARSE, generator=generator)
    return resize(coarse, height, width).view(classes, *shape)


def _noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """One long strip of noise, of which each sample takes a window."""
    return torch.randn(prod(shape) + _WINDOWS - 1, generator=generator_for(seed, "noise")).mul_(0.5)
