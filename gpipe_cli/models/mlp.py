"""A multi-layer perceptron. It flattens its input, so it accepts samples of any shape."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn

from gpipe_cli.values import check_whole_number


def build(
    width: int = 256, depth: int = 4, num_classes: int = 10, input_shape: tuple[int, ...] = (3, 32, 32)
) -> nn.Sequential:
    """Return `depth` hidden layers of `width` units and a layer for the scores."""
    check_whole_number("model.width", width, least=1)
    check_whole_number("model.depth", depth, least=1)
    check_whole_number("model.num_classes", num_classes, least=1)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    units = prod(input_shape)
    for number in range(depth):
        layers[f"hidden{number}"] = nn.Sequential(nn.Flatten(), nn.Linear(units, width), nn.ReLU())
        units = width
    layers["head"] = nn.Linear(units, num_classes)
    return nn.Sequential(layers)
