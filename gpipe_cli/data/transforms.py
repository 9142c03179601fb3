"""Transforms of inputs: none, normalization, or normalization with random shifts and flips.

Each builder takes the data and returns a transform for training and one for held-out samples, which is never random.
Random transforms draw only from the generator they are called with, one per (seed, epoch, sample), so results depend
neither on the order of samples nor on the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpipe_cli.data.datasets import Data
from gpipe_cli.errors import ConfigError
from gpipe_cli.pytree import ModelInput
from gpipe_cli.values import check_whole_number


class Transform(Protocol):
    @property
    def random(self) -> bool:
        """If False, the transform ignores the generator and also accepts a whole batch."""

    def __call__(self, input: Any, generator: torch.Generator | None, /) -> ModelInput: ...


@final
@dataclass(frozen=True)
class Transforms:
    train: Transform | None
    test: Transform | None


def none(data: Data) -> Transforms:
    """Leave inputs unchanged: images have values from 0 to 1."""
    return Transforms(None, None)


def basic(data: Data, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> Transforms:
    """Normalize inputs with a mean and std per channel, by default those of the data."""
    normalize = _normalize(data, mean, std)
    return Transforms(normalize, normalize)


def augment(
    data: Data,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    padding: int = 4,
    flip: bool | None = None,
) -> Transforms:
    """Shift training inputs by up to `padding` pixels, and mirror half of them if `flip` is set; then normalize."""
    check_whole_number("transform.padding", padding, least=0)
    if len(data.shape) != 3:
        raise ConfigError(
            f"transform=augment: works on images only, and the data has the shape {list(data.shape)}"
        )
    _check_tensors(data, "augment")
    normalize = _normalize(data, mean, std)
    return Transforms(Augment(padding, data.flips if flip is None else flip, normalize), normalize)


@final
class Normalize:
    random = False

    def __init__(self, mean: Sequence[float], std: Sequence[float], dimensions: int = 3) -> None:
        """dimensions: those of an input, of which the first are its channels."""
        self.mean, self.std = tuple(mean), tuple(std)
        shape = (-1, *[1] * (dimensions - 1))
        self._mean, self._std = torch.tensor(mean).view(shape), torch.tensor(std).view(shape)

    def __call__(self, input: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return (input - self._mean).div_(self._std)


@final
class Augment:
    random = True

    def __init__(self, padding: int, flip: bool, normalize: Normalize | None) -> None:
        self._padding, self._flip, self._normalize = padding, flip, normalize

    def __call__(self, input: Tensor, generator: torch.Generator | None) -> Tensor:
        assert generator is not None, "a random transform needs a generator"
        height, width = input.shape[-2:]
        top, left = torch.randint(0, 2 * self._padding + 1, (2,), generator=generator).tolist()
        output = pad(input, (self._padding,) * 4)[..., top : top + height, left : left + width]
        if self._flip and torch.randint(0, 2, (), generator=generator):
            output = output.flip(-1)
        return output if self._normalize is None else self._normalize(output)


def _normalize(data: Data, mean: Sequence[float] | None, std: Sequence[float] | None) -> Normalize | None:
    mean, std = data.mean if mean is None else mean, data.std if std is None else std
    if mean is None or std is None:
        if mean is not std:
            raise ConfigError(f"transform.mean={mean}, transform.std={std}: give both or neither")
        return None
    _check_tensors(data, "basic")
    if not len(mean) == len(std) == data.shape[0]:
        raise ConfigError(
            f"transform.mean={list(mean)}, transform.std={list(std)}: the data has {data.shape[0]} channels"
        )
    if min(std) <= 0:
        raise ConfigError(f"transform.std={list(std)}: must be greater than 0")
    return Normalize(mean, std, len(data.shape))


def _check_tensors(data: Data, transform: str) -> None:
    """Raise ConfigError if an input of the data is several tensors: which of them are images is not known here."""
    input, _ = data.train[0]
    if not isinstance(input, Tensor):
        raise ConfigError(
            f"transform={transform}: needs inputs that are one tensor, and the data has a "
            f"{type(input).__name__}; choose transform=none, or a custom transform"
        )
