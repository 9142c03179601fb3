"""The ResNets of torchvision as sequences: a layer is the stem, a residual block or the head.

The modules are written here because importing torchvision takes as long as importing torch. Names, initial values and
bits are torchvision's, so its weights load by name.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import final

from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential import LayerSequence
from gpipe_cli.values import check_whole_number


@final
class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a residual connection around them."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        downsample = _downsample(channels, width, stride)
        self.conv1 = _convolution(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

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
class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions that narrow and widen, with a residual connection."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = self.expansion * width
        downsample = _downsample(channels, out, stride)
        self.conv1 = _convolution(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, out, 1)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

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


BLOCKS: dict[str, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}
"""The block class of each network, and the number of blocks in each of its four stages."""
NAMES = tuple(BLOCKS)


def build(
    name: str = "resnet18",
    num_classes: int = 10,
    zero_init_residual: bool = False,
) -> LayerSequence:
    """Return a ResNet with parameters drawn from torch's default generator.

    With `zero_init_residual` the scale of each block's last batch norm starts at 0, so that every block starts as its
    residual connection, which helps deep networks to learn.
    """
    if name not in NAMES:
        raise ConfigError(f"model.name={name}: no such ResNet; choose one of {', '.join(NAMES)}")
    check_whole_number("model.num_classes", num_classes, least=1)
    sequence = _sequence(name, num_classes)
    if zero_init_residual:
        for layer in sequence:
            if isinstance(layer, BasicBlock | Bottleneck):
                nn.init.zeros_(layer.last_norm.weight)
    return sequence


def _sequence(name: str, num_classes: int) -> LayerSequence:
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
            channels = block.expansion * width
    head = _named(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(1), fc=nn.Linear(channels, num_classes))
    sequence = LayerSequence(
        [stem, *blocks.values(), head], paths=["", *blocks, ""], names=["stem", *blocks, "head"]
    )
    for module in sequence.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return sequence


def _downsample(channels: int, out: int, stride: int) -> nn.Sequential | None:
    """Return what makes a block's input fit its output.

    Blocks create it first but register it last, as torchvision does, so that the initial values are the same.
    """
    if stride == 1 and channels == out:
        return None
    return nn.Sequential(_convolution(channels, out, 1, stride), nn.BatchNorm2d(out))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def _named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))
