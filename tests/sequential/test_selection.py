"""Patterns select parameters by the names of layers, modules and parameters."""

from __future__ import annotations

import re

import pytest
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.models import gpt, mlp, resnet
from gpipe_cli.sequential.selection import matches, select_parameters


def selected(model: nn.Sequential, *patterns: str) -> list[str]:
    return list(select_parameters(model, patterns, "freeze"))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layer1", "layer1.0.conv1.weight", True),
        ("layer1", "layer10.0.conv1.weight", False),
        ("layer1.0.conv1.weight", "layer1.0.conv1.weight", True),
        ("conv1", "layer1.0.conv1.weight", False),
        ("*.bn?.weight", "layer1.0.bn1.weight", True),
        ("*.bn?.weight", "layer1.0.bn1.bias", False),
        ("*.bn?", "layer1.0.bn1.bias", True),
        ("layer[12]", "layer2.1.bn1.bias", True),
        ("*", "anything.at.all", True),
        ("", "weight", False),
        ("layer1.", "layer1.0.conv1.weight", False),
        ("Layer1", "layer1.0.conv1.weight", False),
    ],
)
def test_a_pattern_is_a_name_a_dotted_prefix_or_a_glob(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_layers_count_by_the_names_that_the_profile_shows() -> None:
    model = resnet.build()
    assert selected(model, "stem") == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert selected(model, "head") == ["fc.weight", "fc.bias"] == selected(model, "fc")
    assert selected(model, "layer1.0") == [name for name, _ in model.named_parameters() if "layer1.0" in name]
    assert len(selected(model, "layer1", "layer2.*")) == 12 + 15
    assert selected(mlp.build(depth=1), "hidden0") == ["hidden0.1.weight", "hidden0.1.bias"]


def test_the_selection_has_the_order_of_the_model_whatever_the_order_of_the_patterns() -> None:
    model = resnet.build()
    assert selected(model, "fc", "stem") == selected(model, "stem", "fc", "conv1")


def test_a_tied_parameter_is_selected_by_each_of_its_names_and_listed_once() -> None:
    model = gpt.build(width=8, heads=2, depth=1, tied=True)
    tied = selected(model, "*scores*")
    assert len(tied) == 1
    assert set(tied) < {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("pattern", "cure"),
    [
        ("lay1", "did you mean 'layer1'?"),
        ("layer1.0.conv3", "did you mean 'layer1.0.conv"),
        ("steem", "did you mean 'stem'?"),
        ("xyz*", "it has conv1, stem, bn1, layer1, layer2, layer3, layer4, fc, head"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_a_suggestion(pattern: str, cure: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"freeze={pattern}: no parameter") + ".*" + re.escape(cure)
    ):
        selected(resnet.build(), "stem", pattern)
