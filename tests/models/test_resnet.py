"""The ResNets are those of torchvision, cut into layers: same names, same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.resnet import NAMES, build
from gpipe_cli.vision import torchvision

CONF = Path(__file__).resolve().parents[2] / "conf" / "model"
NUMERIC = [
    "resnet18",
    pytest.param("resnet34", marks=pytest.mark.slow),
    "resnet50",
    pytest.param("resnet101", marks=pytest.mark.slow),
    pytest.param("resnet152", marks=pytest.mark.slow),
]


def original_of(name: str, num_classes: int = 10) -> nn.Module:
    model = getattr(torchvision.models, name)(weights=None, num_classes=num_classes)
    assert isinstance(model, nn.Module)
    return model


@pytest.mark.parametrize("name", NUMERIC)
def test_outputs_gradients_and_buffers_are_bitwise_the_originals(name: str) -> None:
    torch.manual_seed(1)
    original = original_of(name)
    torch.manual_seed(1)
    sequence = build(name)
    input = torch.randn(2, 3, 32, 32)
    for training in (True, False):
        outputs = [model.train(training)(input) for model in (original, sequence)]
        assert torch.equal(*outputs)
        for model, output in zip((original, sequence), outputs, strict=True):
            model.zero_grad()
            output.square().sum().backward()
        for (expected_name, expected), (name, actual) in zip(
            original.named_parameters(), sequence.named_parameters(), strict=True
        ):
            assert expected_name == name
            assert expected.grad is not None and actual.grad is not None
            assert torch.equal(expected, actual) and torch.equal(expected.grad, actual.grad), name
    for (expected_name, expected), (name, actual) in zip(
        original.named_buffers(), sequence.named_buffers(), strict=True
    ):
        assert expected_name == name and torch.equal(expected, actual), name


@pytest.mark.parametrize("name", NAMES)
def test_keys_layers_and_the_facts_of_its_yaml_are_true(name: str) -> None:
    with torch.device("meta"):
        sequence, original = build(name), original_of(name)
    assert list(sequence.state_dict()) == list(original.state_dict())
    assert sequence.layer_names[0] == "stem" and sequence.layer_names[-1] == "head"
    assert sequence.layer_names[1:3] == ("layer1.0", "layer1.1")
    parameters = sum(parameter.numel() for parameter in sequence.parameters())
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    assert re.fullmatch(rf"# torchvision's ResNet-\d+ as {len(sequence)} layers.*", lines[0])
    assert lines[1] == f"# facts: parameters={parameters} layers={len(sequence)} input=3x32x32"


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_blocks_can_start_as_their_residual_connection(name: str) -> None:
    torch.manual_seed(1)
    original = getattr(torchvision.models, name)(weights=None, num_classes=10, zero_init_residual=True)
    torch.manual_seed(1)
    sequence = build(name, zero_init_residual=True)
    state = original.state_dict()
    assert all(torch.equal(state[key], value) for key, value in sequence.state_dict().items())


def test_unknown_names_and_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.name=resnet19: no such ResNet; choose one of resnet18, "):
        build("resnet19")
    with pytest.raises(ConfigError, match=r"model\.num_classes=0: must be a whole number of at least 1"):
        build(num_classes=0)


@pytest.mark.slow
def test_building_one_does_not_import_torchvision_or_the_compiler() -> None:
    program = (
        "import sys; from gpipe_cli.models.resnet import build; build('resnet18');"
        "sys.exit(bool({'torchvision', 'torch._dynamo'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
