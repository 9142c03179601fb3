"""Generated images of discs, squares and triangles, with the class of each pixel as target.

Colors and positions are random, so a network can learn only from outlines. Each sample is a pure function of
(seed, index) and is generated when it is needed.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, check_common_keys, generator_for
from gpipe_cli.values import check_whole_number

_CLASSES = ("background", "disc", "square", "triangle")
_MAX_SHAPES = 3  # in one image; a later shape covers an earlier one
_NOISE = 0.1


def build(
    size: int = 32, length: int = 2048, seed: int = 0, workers: int = 0, timeout: float | None = None
) -> Data:
    """Generate `length` images to train on and a quarter as many held out, `size` pixels wide and high."""
    check_common_keys(size, workers, timeout)
    check_whole_number("data.size", size, least=8)
    check_whole_number("data.length", length, least=1)
    train = ShapesSamples(size, seed, first=0, length=length)
    test = ShapesSamples(size, seed, first=length, length=max(1, length // 4))
    return Data(
        train,
        test,
        classes=len(_CLASSES),
        shape=(3, size, size),
        mean=(0.5,) * 3,
        std=(0.3,) * 3,
        workers=workers,
        timeout=timeout,
        class_names=_CLASSES,
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
            kind = int(torch.randint(1, len(_CLASSES), (), generator=generator))
            inside = self._inside(kind, torch.rand(3, generator=generator))
            image = torch.where(inside, color, image)
            mask[inside] = kind
        image += _NOISE * torch.randn(image.shape, generator=generator)
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
