"""Two U-Nets as sequences, with their long connections as skips.

`build` makes the family of torchgpipe's benchmark, named (B, C): B convolutions between two changes of size, C channels
in the first of them. `build_standard` makes the network of Ronneberger et al. (2015) as it is used today: two
convolutions, batch norm, transposed convolutions.

A layer is a convolution with its norm and activation, a step down, or a step up. A step down stashes its input, and the
step up of the same level pops it, so that partitions in between never receive it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d

from gpipe_cli.errors import ConfigError
from gpipe_cli.skip import Namespace, Skippable, pop, skippable, stash
from gpipe_cli.skip.skippable import Commands
from gpipe_cli.values import check_fraction, check_whole_number

NamedLayers = Iterator[tuple[str, nn.Module]]


def build(
    depth: int = 3,
    convolutions: int = 2,
    base_channels: int = 16,
    dropout: float = 0.0,
    num_classes: int = 4,
    input_shape: tuple[int, ...] = (3, 32, 32),
) -> nn.Sequential:
    """Return the (B, C) network of the benchmark for `convolutions` B and `base_channels` C; its `depth` is 5 levels.

    dropout: share of channels to drop after each convolution.
    """
    check_whole_number("model.convolutions", convolutions, least=1)
    check_fraction("model.dropout", dropout)

    def convolution(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.Dropout2d(dropout),
            nn.InstanceNorm2d(outputs),
            nn.LeakyReLU(),
        )

    style = _Style(convolutions, convolution, lambda inputs: NearestNeighbours(), halves=False)
    return _unet(style, depth, base_channels, num_classes, input_shape)


def build_standard(
    depth: int = 4,
    base_channels: int = 16,
    num_classes: int = 4,
    input_shape: tuple[int, ...] = (3, 32, 32),
) -> nn.Sequential:
    """Return the standard U-Net. The paper has 4 levels and starts with 64 channels."""

    def convolution(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )

    def upsampling(inputs: int) -> nn.Module:
        return nn.ConvTranspose2d(inputs, inputs // 2, 2, stride=2)

    style = _Style(2, convolution, upsampling, halves=True)
    return _unet(style, depth, base_channels, num_classes, input_shape)


@final
@dataclass(frozen=True)
class _Style:
    """Where the two networks differ."""

    convolutions: int
    convolution: Callable[[int, int], nn.Module]
    """From input and output channels."""
    upsampling: Callable[[int], nn.Module]
    """From channels; the module takes an input and the size to reach."""
    halves: bool
    """Whether upsampling halves the channels too; if not, the convolutions before it do."""

    def stack(self, name: str, inputs: int, hidden: int, outputs: int) -> NamedLayers:
        channels = [inputs, *[hidden] * (self.convolutions - 1), outputs]
        for number, (before, after) in enumerate(pairwise(channels)):
            yield f"{name}_{number}", self.convolution(before, after)


def _unet(
    style: _Style, depth: int, base_channels: int, num_classes: int, input_shape: Sequence[int]
) -> nn.Sequential:
    check_whole_number("model.depth", depth, least=1)
    check_whole_number("model.base_channels", base_channels, least=2)
    check_whole_number("model.num_classes", num_classes, least=1)
    _check_size(input_shape, depth)
    return nn.Sequential(OrderedDict(_layers(style, depth, base_channels, num_classes, input_shape[0])))


def _layers(style: _Style, depth: int, base_channels: int, num_classes: int, channels: int) -> NamedLayers:
    levels = [(level, base_channels * 2**level, Namespace()) for level in range(depth)]
    narrower = 1 if style.halves else 2
    for level, width, namespace in levels:
        yield from style.stack(f"encode{level}", channels, width, width)
        yield f"down{level}", _isolated(Down(), namespace)
        channels = width
    yield from style.stack("bottleneck", channels, 2 * channels, 2 * channels // narrower)
    for level, width, namespace in reversed(levels):
        yield f"up{level}", _isolated(Up(style.upsampling(2 * width)), namespace)
        yield from style.stack(f"decode{level}", 2 * width, width // narrower, width // narrower)
    yield "head", nn.Conv2d(base_channels // narrower, num_classes, 1)


def _isolated(layer: nn.Module, namespace: Namespace) -> nn.Module:
    assert isinstance(layer, Skippable), "@skippable replaces the class, which a type checker does not see"
    return layer.isolate(namespace)


def _check_size(shape: Sequence[int], depth: int) -> None:
    if len(shape) != 3:
        raise ConfigError(f"model: a U-Net takes images, and the data has the shape {list(shape)}")
    # Instance norm needs more than one pixel to have a deviation.
    least = 2 ** (depth + 1)
    if min(shape[1:]) < least:
        raise ConfigError(
            f"model.depth={depth}: halves images {depth} times and needs at least {least}x{least} pixels, "
            f"but the data has {shape[1]}x{shape[2]}; give a smaller model.depth or a larger data.size"
        )


@skippable(stash=["level"])
@final
class Down(nn.Module):
    """Halves the size and stashes its input for the step up of the same level."""

    def forward(self, input: Tensor) -> Commands:
        yield stash("level", input)
        return max_pool2d(input, 2)


@skippable(pop=["level"])
@final
class Up(nn.Module):
    """Upsamples to the size of the stashed tensor, so that odd sizes fit too, and concatenates both."""

    def __init__(self, enlarging: nn.Module) -> None:
        super().__init__()
        self.enlarging = enlarging

    def forward(self, input: Tensor) -> Commands:
        level = yield pop("level")
        assert level is not None, "Down stashes a tensor"
        return torch.cat([level, self.enlarging(input, level.shape[-2:])], dim=1)


@final
class NearestNeighbours(nn.Module):
    def forward(self, input: Tensor, output_size: Sequence[int]) -> Tensor:
        return interpolate(input, size=list(output_size))
