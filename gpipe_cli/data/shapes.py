"""Made-up images of discs, squares and triangles, and for each pixel which of them it belongs to.

A network can learn it only by their outlines: colours and places are drawn at random. Each sample is a pure
function of (seed, index), computed when asked for.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data
from gpipe_cli.data.keys import check_common_keys
from gpipe_cli.data.seeds import generator_for
from gpipe_cli.values import check_whole_number

_CLASSES = 4  # background, disc, square, triangle
_MOST = 3  # shapes in one image; a later one covers an earlier one
_NOISE = 0.1


def build(
    size: int = 32, length: int = 2048, seed: int = 0, workers: int = 0, timeout: float | None = None
) -> Data:
    """`length` images to train on and a quarter as many held out, `size` pixels each way."""
    check_common_keys(size, workers, timeout)
    check_whole_number("data.size", size, least=8)
    check_whole_number("data.length", length, least=1)
    train = ShapesSamples(size, seed, first=0, length=length)
    test = ShapesSamples(size, seed, first=length, length=max(1, length // 4))
    return Data(
        train,
        test,
        classes=_CLASSES,
        shape=(3, size, size),
        mean=(0.5,) * 3,
        std=(0.3,) * 3,
        workers=workers,
        timeout=timeout,
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
        chance = generator_for(self._seed, "shapes", self._first + index)
        colours = torch.rand(_MOST + 1, 3, 1, 1, generator=chance)
        image = colours[0].repeat(1, self._size, self._size)
        mask = torch.zeros(self._size, self._size, dtype=torch.long)
        for colour in colours[1 : 2 + int(torch.randint(_MOST, (), generator=chance))]:
            kind = int(torch.randint(1, _CLASSES, (), generator=chance))
            inside = self._outline(kind, torch.rand(3, generator=chance))
            image = torch.where(inside, colour, image)
            mask[inside] = kind
        image += _NOISE * torch.randn(image.shape, generator=chance)
        return image.clamp_(0, 1), mask

    def _outline(self, kind: int, place: Tensor) -> Tensor:
        """Which pixels are inside. Place: where it is, across and down, and how large, each from 0 to 1."""
        radius = (0.12 + 0.13 * float(place[2])) * self._size
        room = self._size - 1 - 2 * radius
        centre_x, centre_y = (radius + room * float(one) for one in place[:2])
        pixels = torch.arange(self._size)
        across, down = (pixels - centre_x).unsqueeze(0), (pixels - centre_y).unsqueeze(1)
        if kind == 1:
            return across.square() + down.square() <= radius**2
        if kind == 2:
            return (across.abs() <= radius) & (down.abs() <= radius)
        return (2 * across.abs() <= down + radius) & (down <= radius)
