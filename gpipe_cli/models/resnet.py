"""The ResNets of torchvision as sequences of their natural blocks.

A layer is the stem, one residual block, or the head. The modules are torchvision's own, so outputs are
bitwise those of the original and its weights load by name. The file knows nothing of partitions.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.classes import check_num_classes
from gpipe_cli.models.weights import load_weights, read_weights
from gpipe_cli.sequential import Sequence
from gpipe_cli.vision import torchvision

NAMES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


def build(name: str = "resnet18", num_classes: int = 10, weights: str | Path | None = None) -> Sequence:
    """A ResNet with fresh parameters from torch's default generator, or with those of the file `weights`."""
    if name not in NAMES:
        raise ConfigError(f"model.name={name}: unknown ResNet; choose one of {', '.join(NAMES)}")
    check_num_classes(num_classes)
    sequence = _as_sequence(getattr(torchvision.models, name)(weights=None, num_classes=num_classes))
    if weights is not None:
        _load(sequence, weights, num_classes)
    return sequence


def _as_sequence(resnet: nn.Module) -> Sequence:
    stem = _group(resnet, "conv1", "bn1", "relu", "maxpool")
    head = _group(resnet, "avgpool", "flatten", "fc")
    stages = ("layer1", "layer2", "layer3", "layer4")
    blocks = {
        f"{stage}.{index}": block
        for stage in stages
        for index, block in enumerate(resnet.get_submodule(stage).children())
    }
    return Sequence(
        [stem, *blocks.values(), head],
        paths=["", *blocks, ""],
        names=["stem", *blocks, "head"],
        original=resnet,
    )


def _group(resnet: nn.Module, *names: str) -> nn.Sequential:
    # torchvision flattens by a function call, the only step of its forward that is no module.
    modules = ((name, nn.Flatten(1) if name == "flatten" else resnet.get_submodule(name)) for name in names)
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
