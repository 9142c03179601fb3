"""Our own models have the parameters that were published for them, counted without storage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli.models import amoebanetd, gpt, unet


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("convolutions", "base_channels", "published"),
    [
        (6, 72, "362.2M"),
        (11, 128, "2.21B"),
        (24, 128, "4.99B"),
        (24, 160, "7.80B"),
        (48, 160, "15.82B"),
    ],
)
def test_a_unet_of_the_benchmark(convolutions: int, base_channels: int, published: str) -> None:
    with torch.device("meta"):
        model = unet.build(5, convolutions, base_channels, num_classes=1, input_shape=(3, 192, 192))
    assert rounded(parameters(model), published) == published


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "published"),
    [
        (18, 208, "81.5M"),
        (18, 416, "319.0M"),
        (18, 544, "542.7M"),
        (36, 544, "1.06B"),
        (72, 512, "1.84B"),
    ],
)
def test_an_amoebanet(num_layers: int, num_filters: int, published: str) -> None:
    with torch.device("meta"):
        model = amoebanetd.build(1000, num_layers, num_filters, input_shape=(3, 224, 224))
    assert rounded(parameters(model), published) == published


def rounded(count: int, like: str) -> str:
    """With the unit and as many digits as published."""
    unit, digits = like[-1], len(like.partition(".")[2]) - 1
    return f"{count / {'M': 1e6, 'B': 1e9}[unit]:.{digits}f}{unit}"


def test_the_standard_unet_is_the_reference_network() -> None:
    with torch.device("meta"):
        assert parameters(unet.build_standard(base_channels=64, num_classes=1)) == 31_037_633
        assert parameters(unet.build_standard(base_channels=64, num_classes=2)) == 31_037_698


@pytest.mark.parametrize(
    ("width", "depth", "heads", "published"),
    [(768, 12, 12, 124_439_808), (1024, 24, 16, 354_823_168), (1600, 48, 25, 1_557_611_200)],
)
def test_a_gpt_2(width: int, depth: int, heads: int, published: int) -> None:
    with torch.device("meta"):
        model = gpt.build(width, depth, heads, vocabulary=50257, input_shape=(1024,))
        untied = gpt.build(width, depth, heads, vocabulary=50257, input_shape=(1024,), tied=False)
    assert parameters(model) == published
    assert parameters(untied) == published + 50257 * width
