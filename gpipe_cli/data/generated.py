"""Generated data, from little memory: each sample is a pure function of (seed, index), computed when it is needed.

Synthetic data may have any shape: each class has a pattern, and a sample is its class's pattern plus noise. A network
can learn it, so a loss that does not fall is a bug. Shapes are images of discs, squares and triangles, with the class
of each pixel as target; colors and positions are random, so a network can learn only from outlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, check_size, generator_for, resize
from gpipe_cli.errors import ConfigError
from gpipe_cli.values import check_whole_number

_WINDOWS = 2**16  # number of different noises
_STRIDE = 40503  # odd, so consecutive samples use every window before any repeats
_COARSE = 4  # side of a pattern before scaling: finer detail would not survive a network's pooling
_SHAPE_CLASSES = ("background", "disc", "square", "triangle")
_MAX_SHAPES = 3  # in one image; a later shape covers an earlier one
_PIXEL_NOISE = 0.1


def build_synthetic(
    shape: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    length: int = 1024,
    seed: int = 0,
    size: int | None = None,
) -> Data:
    """Generate `length` samples and a quarter as many to hold out; `size` replaces the height and width of `shape`."""
    check_size(size)
    check_whole_number("data.classes", classes, least=1)
    check_whole_number("data.length", length, least=1)
    shape = _checked_shape(shape, size)
    patterns, noise = _patterns(shape, classes, seed), _noise(shape, seed)
    train = SyntheticSamples(patterns, noise, first=0, length=length)
    test = SyntheticSamples(patterns, noise, first=length, length=max(1, length // 4))
    return Data(train, test, classes=classes, shape=shape)


@final
class SyntheticSamples:
    def __init__(self, patterns: Tensor, noise: Tensor, first: int, length: int) -> None:
        self._patterns, self._noise = patterns, noise
        self._first, self._length = first, length

    @property
    def targets(self) -> Tensor:
        return torch.arange(self._first, self._first + self._length) % len(self._patterns)

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
            f"data.size={size}: applies to images only, and data.shape is {list(shape)}; remove it"
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


def build_shapes(size: int = 32, length: int = 2048, seed: int = 0) -> Data:
    """Generate `length` images to train on and a quarter as many held out, `size` pixels wide and high."""
    check_size(size)
    check_whole_number("data.size", size, least=8)
    check_whole_number("data.length", length, least=1)
    train = ShapesSamples(size, seed, first=0, length=length)
    test = ShapesSamples(size, seed, first=length, length=max(1, length // 4))
    return Data(
        train,
        test,
        classes=len(_SHAPE_CLASSES),
        shape=(3, size, size),
        mean=(0.5,) * 3,
        std=(0.3,) * 3,
        class_names=_SHAPE_CLASSES,
    )


@final
class ShapesSamples:
    def __init__(self, size: int, seed: int, first: int, length: int) -> None:
        self._size, self._seed, self._first, self._length = size, seed, first, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        generator = generator_for(self._seed, "shapes", self._first + index)
        colors = torch.rand(_MAX_SHAPES + 1, 3, 1, 1, generator=generator)
        image = colors[0].repeat(1, self._size, self._size)
        mask = torch.zeros(self._size, self._size, dtype=torch.long)
        for color in colors[1 : 2 + int(torch.randint(_MAX_SHAPES, (), generator=generator))]:
            kind = int(torch.randint(1, len(_SHAPE_CLASSES), (), generator=generator))
            inside = self._inside(kind, torch.rand(3, generator=generator))
            image = torch.where(inside, color, image)
            mask[inside] = kind
        image += _PIXEL_NOISE * torch.randn(image.shape, generator=generator)
        return image.clamp_(0, 1), mask

    def _inside(self, kind: int, geometry: Tensor) -> Tensor:
        """Which pixels are inside a shape; `geometry` is its x, y and size, each from 0 to 1."""
        radius = (0.12 + 0.13 * float(geometry[2])) * self._size
        free = self._size - 1 - 2 * radius
        center_x, center_y = (radius + free * float(coordinate) for coordinate in geometry[:2])
        pixels = torch.arange(self._size)
        x, y = (pixels - center_x).unsqueeze(0), (pixels - center_y).unsqueeze(1)
        if kind == 1:
            return x.square() + y.square() <= radius**2
        if kind == 2:
            return (x.abs() <= radius) & (y.abs() <= radius)
        return (2 * x.abs() <= y + radius) & (y <= radius)
