"""What a dataset is to the rest of gpipe, and datasets that live in memory.

A dataset builder returns one `Data`: samples to train on, samples held out, and the facts a model or a
transform needs. The file knows nothing of files, of order or of batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import interpolate


class Samples(Protocol):
    """Samples by index: an input, and a target that is a number or a tensor."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor | int]: ...


@runtime_checkable
class BatchedSamples(Protocol):
    """Samples that give many at once, which for data in memory is many times faster than one by one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor | int]: ...
    def batch(self, indices: Tensor, /) -> tuple[Tensor, Tensor]: ...


@final
@dataclass(frozen=True)
class Data:
    train: Samples
    test: Samples
    classes: int
    shape: tuple[int, ...]
    """Of one input."""
    mean: tuple[float, ...] | None = None
    """Per channel, over the training inputs; None where it is not known."""
    std: tuple[float, ...] | None = None
    flips: bool = False
    """Whether a mirrored input still belongs to its class: a cat does, a digit does not."""
    workers: int = 0
    """Processes that load samples; 0 loads them where they are used."""
    timeout: float | None = None
    """Seconds such a process may take for a mini-batch."""


@final
class ImageSamples:
    """Images in memory as small integers, given as floats from 0 to 1.

    images: uint8 [length, channels, height, width].
    white: the value that becomes 1.
    size: the side that images are scaled to; None leaves them as they are.
    channels: how often a single channel is repeated.
    """

    def __init__(
        self, images: Tensor, targets: Tensor, *, white: int = 255, size: int | None = None, channels: int = 3
    ) -> None:
        assert len(images) == len(targets) and images.dtype == torch.uint8 and images.dim() == 4
        self._images, self._targets = images, targets.long()
        self._white, self._size, self._channels = white, size, channels

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width = self._images.shape[2:]
        return self._channels, self._size or height, self._size or width

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return inputs[0], targets[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self._images.index_select(0, indices).float().div_(self._white)
        if self._size is not None:
            inputs = scaled(inputs, self._size, self._size)
        return inputs.expand(-1, self._channels, -1, -1).contiguous(), self._targets.index_select(0, indices)


def scaled(images: Tensor, height: int, width: int) -> Tensor:
    """Images [length, channels, height, width] at another size, smooth both ways."""
    if images.shape[-2:] == (height, width):
        return images
    return interpolate(images, size=(height, width), mode="bilinear", antialias=True)
