"""U-Nets give a score for every pixel of any image, with long skips from each level to its counterpart."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.unet import build, build_standard
from gpipe_cli.skip import skip_layout

SMALL = [build(2, 1, 4, num_classes=5), build(2, 3, 4, num_classes=5), build_standard(2, 4, num_classes=5)]


@pytest.mark.parametrize("model", SMALL, ids=["one convolution", "three", "standard"])
@pytest.mark.parametrize("side", [(16, 16), (17, 23), (8, 31)])
def test_every_pixel_gets_its_scores_whatever_the_sides(model: nn.Sequential, side: tuple[int, int]) -> None:
    assert model(torch.randn(2, 3, *side)).shape == (2, 5, *side)


@pytest.mark.parametrize("make", [build, build_standard])
def test_each_level_has_a_skip_over_the_levels_below(make: Any) -> None:
    model = make(3, base_channels=4)
    names = [name for name, _ in model.named_children()]
    sends = skip_layout(list(model)).sends
    jumps = [
        (names[source], names[route.partition]) for source, of_one in enumerate(sends) for route in of_one
    ]
    assert sorted(jumps) == [(f"down{level}", f"up{level}") for level in range(3)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"depth": 0}, "model.depth=0: must be a whole number of at least 1"),
        ({"base_channels": 1}, "model.base_channels=1: must be a whole number of at least 2"),
        (
            {"depth": 5},
            "model.depth=5: halves images 5 times and needs at least 64x64 pixels, but the data has 32x32",
        ),
        ({"input_shape": (32,)}, "a U-Net takes images, and the data has the shape [32]"),
        ({"num_classes": 0}, "model.num_classes=0: must be a whole number of at least 1"),
    ],
)
@pytest.mark.parametrize("make", [build, build_standard])
def test_settings_that_do_not_fit_are_refused(make: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make(**keys)


def test_the_number_of_convolutions_and_the_dropout_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"model\.convolutions=0: must be a whole number of at least 1"):
        build(convolutions=0)
    with pytest.raises(ConfigError, match=r"model\.dropout=-1: must be from 0 to 1"):
        build(dropout=-1)
