"""The configured model becomes a sequence by tracing, with leaves or from a list of layers; with or without storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.build.model import as_sequence, build_on_meta, check_own_keys
from gpipe_cli.errors import ConfigError
from tests.support.command_line import Gpipe, UserModule

SOURCE = """
import torch
from torch import nn

class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, input):
        return input if {condition} else self.inner(input)

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.gate = Gate()
        self.fc = nn.Linear(16, num_classes)

    def forward(self, input):
        return self.fc(self.gate(self.pool(self.stem(input).relu()).flatten(1)))

def build(num_classes=10):
    return Net(num_classes)
"""
WORDS = ("steps=2", "batch_size=8", "data=synthetic", "data.length=16", "data.size=8")


@pytest.fixture
def train(gpipe: Gpipe, user_module: UserModule) -> Gpipe:
    """Trains a network that lies in the current folder."""

    def run(condition: str, *words: str) -> Any:
        user_module("net_for_tests", SOURCE.replace("{condition}", condition))
        return gpipe("train", "model._target_=net_for_tests.build", "allow=[net_for_tests]", *WORDS, *words)

    return run


def test_a_model_that_is_not_a_sequence_is_traced(train: Gpipe) -> None:
    answer = train("False", "partitions=3")
    assert answer.code == 0, answer.err


def test_a_module_that_decides_on_values_stays_whole_or_is_listed_as_a_layer(
    train: Gpipe,
) -> None:
    condition = "input.sum() > 0"
    assert train(condition).code == 0
    assert train(condition, "model.leaves=[gate]").code == 0
    layers = "model.layers=[stem,{call:torch.relu},pool,{call:torch.flatten,start_dim:1},gate,fc]"
    assert train(condition, layers).code == 0


def test_a_list_of_layers_divides_the_blocks_of_a_resnet(gpipe: Gpipe) -> None:
    items = "conv1,bn1,relu,maxpool,layer1,layer2,layer3,layer4,avgpool,{call:torch.flatten,start_dim:1},fc"
    target = "model._target_=torchvision.models.resnet18"
    answer = gpipe("train", target, f"model.layers=[{items}]", "balance=uniform", "--dry-run", "--json")
    assert answer.code == 0, answer.err
    assert [row["layers"] for row in answer.json["partitions"]] == [8, 7]


def test_a_list_of_layers_may_name_only_submodules_and_harmless_functions() -> None:
    check_own_keys({"layers": ["fc", {"call": "torch.flatten", "start_dim": 1}], "leaves": ["fc"]})
    for items, message in (
        ([{"call": "torch.load"}], r"model\.layers\[0\]\.call=torch\.load: not allowed here; "),
        (["a", 3], r"model\.layers\[1\]=3: give the name of a submodule, or \{call: torch\.flatten"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_own_keys({"layers": items})


def test_a_sequence_stays_as_it_is_without_keys_about_its_layers() -> None:
    model, sample = (
        nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)),
        torch.ones(2, 2),
    )
    assert as_sequence(model, {}, sample) is model
    assert len(as_sequence(model, {"layers": ["0", "1"]}, sample)) == 3
    assert len(as_sequence(model, {"leaves": ["0"]}, sample)) == 2


def test_a_model_built_on_meta_keeps_its_ties() -> None:
    def make() -> nn.Sequential:
        first, second = nn.Linear(400, 400), nn.Linear(400, 400)
        second.weight = first.weight
        return nn.Sequential(first, nn.BatchNorm1d(400), second)

    model = build_on_meta(make)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model[0].weight is model[2].weight


def test_a_constructor_that_needs_values_gets_them_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> nn.Sequential:
        width = 1 + int(torch.ones(1 << 17).mean().item())
        return nn.Sequential(nn.Linear(width, 3))

    model = build_on_meta(make)
    assert model[0].weight.shape == (3, 2) and model[0].weight.is_meta
    assert "with storage, because its constructor needs values" in capsys.readouterr().err


def test_a_model_without_values_ignores_weights_without_a_warning() -> None:
    state = nn.Linear(400, 400).state_dict()

    def make() -> nn.Sequential:
        layer = nn.Linear(400, 400)
        layer.load_state_dict(state)
        return nn.Sequential(layer)

    assert build_on_meta(make)[0].weight.is_meta
