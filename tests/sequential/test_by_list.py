"""A list of names makes a sequence that computes, and is called, as the model it was taken from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential import LayerSequence, flatten_model, partition_uniform
from gpipe_cli.vision import torchvision

RESNET = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.stem = nn.Linear(3, 4)
        self.act = nn.ReLU()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Tanh())) for _ in range(2)]
        )

    def forward(self, input: Tensor) -> Tensor:
        value = self.act(self.stem(input))
        for block in self.blocks:
            value = self.act(block(value))
        output: Tensor = self.head(value)
        return output


def test_the_seeds_resnet_is_bitwise_the_original_and_loads_its_state() -> None:
    original = torchvision.models.resnet18(weights=None, num_classes=5)
    sequence = flatten_model(original, [*RESNET, lambda x: torch.flatten(x, 1), "fc"])
    assert len(sequence) == 15 and sequence.layer_names[4:6] == ("layer1.0", "layer1.1")
    assert list(sequence.state_dict()) == list(original.state_dict())
    sequence.load_state_dict(original.state_dict())
    input = torch.randn(2, 3, 32, 32)
    assert torch.equal(sequence.eval()(input), original.eval()(input))


def test_containers_are_expanded_and_a_layer_without_parameters_may_come_twice() -> None:
    original = Net()
    items = ["stem", "act", "blocks.0", "act", original.blocks[1], nn.ReLU(), "head"]
    sequence = flatten_model(original, items)
    assert sequence.paths[2:6] == ("blocks.0.0", "blocks.0.1.0", "blocks.0.1.1", "act")
    assert len(set(sequence.children())) == len(sequence)
    assert list(sequence.state_dict()) == list(original.state_dict())
    input = torch.randn(5, 3)
    for model in (original, sequence):
        model(input).sum().backward()
    assert torch.equal(original(input), sequence(input))
    assert [name for name, _ in sequence.named_parameters()] == [
        name for name, _ in original.named_parameters()
    ]


def test_a_bare_list_is_given_on_request_and_a_part_of_a_model_is_a_sequence_too() -> None:
    original = Net()
    layers = flatten_model(original, ["stem", torch.relu], return_list=True, allow_unused=True)
    assert layers[0] is original.stem and repr(layers[1]) == "FunctionLayer(relu)"
    part = flatten_model(original, ["stem", "act"], allow_unused=True)
    assert list(part.state_dict()) == ["stem.weight", "stem.bias"]


def test_an_unknown_name_is_answered_with_close_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"Net has no submodule 'blocks\.5'; close names: blocks\.1, blocks\.0, "
    ):
        flatten_model(Net(), ["blocks.5"])
    with pytest.raises(ConfigError, match=r"no submodule 'zzz'; close names: head, stem, act, blocks$"):
        flatten_model(Net(), ["zzz"])


def test_what_is_no_layer_and_what_is_listed_twice_is_refused() -> None:
    with pytest.raises(TypeError, match=r"layer 1 is a int \(3\); give the name of a submodule"):
        flatten_model(Net(), ["stem", 3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"layer 'stem' is listed twice \(first in 'stem'\).*list it once"):
        flatten_model(Net(), ["stem", "act", "stem"])
    with pytest.raises(ConfigError, match=r"layer 'blocks\.0\.0' is listed twice"):
        flatten_model(Net(), ["blocks", "blocks.0"])


@pytest.mark.parametrize("return_list", [False, True])
def test_a_list_that_leaves_out_parameters_or_buffers_is_refused(return_list: Any) -> None:
    """A list that forgot the position embedding trained another model, and nobody noticed."""
    with pytest.raises(
        ConfigError, match=r"leave out .* of Net: head\.weight, head\.bias; list .* model\.allow_unused=true"
    ):
        flatten_model(Net(), ["stem", "blocks"], return_list)
    model = Net()
    model.register_buffer("scale", torch.ones(2))
    with pytest.raises(ConfigError, match=r"of Net: scale; list the modules that hold them"):
        flatten_model(model, ["stem", "blocks", "head", lambda x: x * model.scale], return_list)
    tied = Net()
    tied.other = nn.Linear(4, 2)
    tied.other.weight, tied.other.bias = tied.head.weight, tied.head.bias
    assert flatten_model(tied, ["stem", "blocks", "other"], return_list), "every tensor is in a layer"


@given(st.integers(1, 40), st.integers(1, 40))
def test_parts_are_consecutive_nearly_equal_and_never_empty(layers: int, partitions: int) -> None:
    items = list(range(layers))
    if partitions > layers:
        with pytest.raises(ConfigError, match=rf"partitions={partitions}: must be from 1 to {layers}"):
            partition_uniform(items, partitions)
        return
    parts = partition_uniform(items, partitions)
    assert [item for part in parts for item in part] == items
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert [partition_uniform(items, partitions, index) for index in range(partitions)] == parts


def test_parts_of_a_sequence_keep_the_original_names() -> None:
    sequence = flatten_model(Net(), ["stem", "act", "blocks", "head"])
    parts = partition_uniform(sequence, 3)
    assert all(isinstance(part, LayerSequence) for part in parts)
    assert list(parts[2].state_dict())[:2] == ["head.weight", "head.bias"]
    with pytest.raises(ConfigError, match=r"index=3: must be from 0 to 2, for 3 partitions"):
        partition_uniform(sequence, 3, 3)
