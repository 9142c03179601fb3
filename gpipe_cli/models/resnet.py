"""The ResNets of torchvision as sequences of their natural blocks.

A layer is the stem, one residual block, or the head. The modules are written here, because importing torchvision
takes as long as importing torch; names, random numbers drawn and bits are torchvision's, so its weights load by name.
The file knows nothing of partitions.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import final

from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.classes import check_num_classes
from gpipe_cli.models.weights import load_weights, read_weights
from gpipe_cli.sequential import Sequence

__all__ = ["NAMES", "build"]


@final
class _Basic(nn.Module):
    """Two convolutions of 3 x 3 with a way around them."""

    widening = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        around = _around(channels, width, stride)
        self.conv1 = _convolution(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = around

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn2

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.relu(self.bn1(self.conv1(input)))
        output = self.bn2(self.conv2(output))
        output += input if self.downsample is None else self.downsample(input)
        relu: Tensor = self.relu(output)
        return relu


@final
class _Bottleneck(nn.Module):
    """A convolution of 3 x 3 between two of 1 x 1 that make it narrow, with a way around them."""

    widening = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = self.widening * width
        around = _around(channels, out, stride)
        self.conv1 = _convolution(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, out, 1)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = around

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.bn3

    def forward(self, input: Tensor) -> Tensor:
        output = self.relu(self.bn1(self.conv1(input)))
        output = self.relu(self.bn2(self.conv2(output)))
        output = self.bn3(self.conv3(output))
        output += input if self.downsample is None else self.downsample(input)
        relu: Tensor = self.relu(output)
        return relu


BLOCKS: dict[str, tuple[type[_Basic] | type[_Bottleneck], tuple[int, ...]]] = {
    "resnet18": (_Basic, (2, 2, 2, 2)),
    "resnet34": (_Basic, (3, 4, 6, 3)),
    "resnet50": (_Bottleneck, (3, 4, 6, 3)),
    "resnet101": (_Bottleneck, (3, 4, 23, 3)),
    "resnet152": (_Bottleneck, (3, 8, 36, 3)),
}
"""The kind of a network's blocks, and how many each of its four stages has."""
NAMES = tuple(BLOCKS)


def build(
    name: str = "resnet18",
    num_classes: int = 10,
    weights: str | Path | None = None,
    zero_init_residual: bool = False,
) -> Sequence:
    """A ResNet with fresh parameters from torch's default generator, or with those of the file `weights`.

    With `zero_init_residual` every block begins as its way around: the scale of its last batch norm is 0. Deep ones
    learn sooner so.
    """
    if name not in NAMES:
        raise ConfigError(f"model.name={name}: unknown ResNet; choose one of {', '.join(NAMES)}")
    check_num_classes(num_classes)
    sequence = _sequence(name, num_classes)
    if zero_init_residual:
        for layer in sequence:
            if isinstance(layer, _Basic | _Bottleneck):
                nn.init.zeros_(layer.last_norm.weight)
    if weights is not None:
        _load(sequence, weights, num_classes)
    return sequence


def _sequence(name: str, num_classes: int) -> Sequence:
    block, counts = BLOCKS[name]
    stem = _named(
        conv1=_convolution(3, 64, 7, stride=2),
        bn1=nn.BatchNorm2d(64),
        relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    blocks: dict[str, nn.Module] = {}
    channels = 64
    for stage, count in enumerate(counts):
        width = 64 << stage
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks[f"layer{stage + 1}.{index}"] = block(channels, width, stride)
            channels = block.widening * width
    head = _named(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(1), fc=nn.Linear(channels, num_classes))
    sequence = Sequence(
        [stem, *blocks.values(), head], paths=["", *blocks, ""], names=["stem", *blocks, "head"]
    )
    for module in sequence.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return sequence


def _around(channels: int, out: int, stride: int) -> nn.Sequential | None:
    """What makes a block's input fit its output. Made before the block's own, as in torchvision, where it is
    registered last: random numbers are drawn in this order.
    """
    if stride == 1 and channels == out:
        return None
    return nn.Sequential(_convolution(channels, out, 1, stride), nn.BatchNorm2d(out))


def _convolution(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False)


def _named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def _load(sequence: Sequence, path: str | Path, num_classes: int) -> None:
    tensors = read_weights(path)
    classes = tensors["fc.bias"].numel() if "fc.bias" in tensors else num_classes
    if classes != num_classes:
        raise ConfigError(
            f"model.weights={path}: has {classes} classes, model.num_classes is {num_classes}; "
            f"set model.num_classes={classes}"
        )
    load_weights(sequence, tensors, path)
