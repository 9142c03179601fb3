"""Weights of a file load into a model by name, whatever wraps the names; only a head may be new, if asked for."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.build.model import head_tensors
from gpipe_cli.errors import ConfigError
from gpipe_cli.models import gpt, resnet
from gpipe_cli.models.weights import fitted_weights, load_weights
from gpipe_cli.sequential import to_sequential
from gpipe_cli.vision import torchvision

Tensors = Mapping[str, Tensor]


def small(classes: int = 3) -> nn.Sequential:
    body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(4, classes)))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def assert_loads(model: nn.Module, file: Tensors, expected: Tensors) -> None:
    load_weights(model, {"": dict(file)}, "w.pth")
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model.", "net.encoder."]
)
def test_a_prefix_of_a_wrapper_is_removed(prefix: str) -> None:
    stored = state(small())
    assert_loads(small(), prefixed(prefix)(stored), stored)


def test_names_of_compiled_parts_are_those_of_the_parts() -> None:
    stored = state(small())
    compiled = {name.replace("body.", "body._orig_mod."): tensor for name, tensor in stored.items()}
    assert_loads(small(), compiled, stored)


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_partitions_of_torchgpipe_hold_the_layers_by_their_own_names(wrapper: str) -> None:
    stored = state(small())
    partitions = {"body": "partitions.0.", "head": "partitions.1."}
    piped = {wrapper + partitions[name.partition(".")[0]] + name: tensor for name, tensor in stored.items()}
    assert_loads(small(), piped, stored)


def test_partitions_of_a_numbered_sequence_load_by_layer() -> None:
    """Layers of a Sequence are numbered for torchgpipe, and have the names of the original model for us."""
    with torch.device("meta"):
        model = resnet.build(num_classes=2)
    keys = {
        f"partitions.{index // 4}.{index}.{name}": torch.full(tensor.shape, index, dtype=tensor.dtype)
        for index, layer in enumerate(model)
        for name, tensor in layer.state_dict().items()
    }
    fitted = fitted_weights(model, {"": keys}, "w.pth")
    assert fitted.keys() == model.state_dict().keys()
    assert all(fitted[model.original_key(key.split(".", 2)[2])] is tensor for key, tensor in keys.items())


def test_the_state_dict_that_fits_is_chosen_and_averaged_weights_come_first() -> None:
    model, stored, averaged = small(), state(small()), state(small())
    file = {
        "": {"step": torch.zeros(())},
        "discriminator": {"weight": torch.zeros(3)},
        "state_dict": stored,
        "state_dict_ema": {**prefixed("module.")(averaged), "n_averaged": torch.zeros(())},
    }
    loaded = load_weights(model, file, "w.pth")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in averaged.items())
    assert str(loaded) == "9 of 9 tensors from w.pth (state_dict_ema); left out: n_averaged"


def test_files_without_the_counts_of_batch_norms_load() -> None:
    stored = {name: tensor for name, tensor in state(small()).items() if "tracked" not in name}
    loaded = load_weights(small(), {"": stored}, "w.pth")
    assert str(loaded) == "8 of 9 tensors from w.pth; new: 1 num_batches_tracked"


def test_a_tied_tensor_may_be_stored_once() -> None:
    model = gpt.build(width=8, heads=2, depth=1, tied=True)
    stored = state(gpt.build(width=8, heads=2, depth=1, tied=True))
    del stored[list(stored)[-1]]
    assert_loads(model, stored, stored)


@pytest.mark.parametrize(
    ("name", "renaming"),
    [
        ("densenet121", (r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2.")),
        ("vit_b_32", (r"\.mlp\.(0|3)\.", lambda match: f".mlp.linear_{'1' if match[1] == '0' else '2'}.")),
    ],
)
def test_names_of_older_versions_of_torchvision_are_converted(name: str, renaming: tuple[str, str]) -> None:
    """The files that torchvision publishes still have them."""
    with torch.device("meta"):
        model = torchvision.models.get_model(name, num_classes=2)
    stored = {
        key: torch.full(tensor.shape, 0.5, dtype=tensor.dtype) for key, tensor in model.state_dict().items()
    }
    old = {re.sub(renaming[0], renaming[1], key): tensor for key, tensor in stored.items()}
    assert old.keys() != stored.keys()
    fitted = fitted_weights(model, {"": old}, "w.pth")
    assert fitted.keys() == stored.keys() and not any(tensor.is_meta for tensor in fitted.values())


def test_another_precision_is_converted_but_integers_are_refused() -> None:
    model = nn.Linear(3, 2)
    given = {name: tensor.half() for name, tensor in model.state_dict().items()}
    load_weights(model, {"": given}, "file")
    given["weight"] = given["weight"].int()
    with pytest.raises(ConfigError, match="1 with another dtype: weight int32 instead of float32"):
        load_weights(model, {"": given}, "file")


def test_weights_of_another_model_are_listed_and_counted() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    tensors = model.state_dict()
    with pytest.raises(
        ConfigError, match=r"w\.pth: made for another model \(8 missing: 0\.weight.*, \.\.\.\)"
    ):
        load_weights(model, {"": {}}, "w.pth")
    with pytest.raises(ConfigError, match=r"\(1 missing: 3\.bias; 1 unexpected: other\)"):
        incomplete = {name: tensor for name, tensor in tensors.items() if name != "3.bias"}
        load_weights(model, {"": incomplete | {"other": torch.zeros(1)}}, "w.pth")
    with pytest.raises(ConfigError, match=r"\(1 with another shape: 0\.weight 5x2 instead of 2x2\)"):
        load_weights(model, {"": tensors | {"0.weight": torch.zeros(5, 2)}}, "w.pth")


def test_a_larger_model_with_the_same_names_is_another_model() -> None:
    with torch.device("meta"):
        stored = resnet.build("resnet34", num_classes=2).state_dict()
        model = resnet.build("resnet18", num_classes=2)
    with pytest.raises(ConfigError, match=r"made for another model \(80 unexpected: layer1\.2\.conv1"):
        fitted_weights(model, {"": stored}, "w.pth")


HEAD = ("head.weight", "head.bias")


def test_a_head_of_another_size_is_replaced_only_if_asked_for() -> None:
    stored = state(small(5))
    with pytest.raises(
        ConfigError,
        match=r"head has another size \(head\.weight 5x4 instead of 3x4.*give model\.new_head=true",
    ):
        load_weights(small(3), {"": stored}, "w.pth", head=lambda: HEAD)
    for classes in (3, 5):  # also a head that would fit
        model = small(classes)
        initial = state(model)
        loaded = load_weights(model, {"": stored}, "w.pth", head=lambda: HEAD, new_head=True)
        assert str(loaded) == "7 of 9 tensors from w.pth; new: head.weight, head.bias"
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, (initial if name in HEAD else stored)[name]), name


def test_a_missing_head_or_one_of_another_kind_may_be_new() -> None:
    stored = {name: tensor for name, tensor in state(small()).items() if name not in HEAD}
    with pytest.raises(
        ConfigError, match=r"has another head or none \(head\.weight, head\.bias\); give model"
    ):
        load_weights(small(), {"": stored}, "w.pth", head=lambda: HEAD)
    loaded = load_weights(small(), {"": stored}, "w.pth", head=lambda: HEAD, new_head=True)
    assert loaded.new == list(HEAD)
    other = {**stored, "head.0.weight": torch.zeros(8, 4), "head.2.weight": torch.zeros(5, 8)}
    loaded = load_weights(small(), {"": other}, "w.pth", head=lambda: HEAD, new_head=True)
    assert str(loaded).endswith("; new: head.weight, head.bias; left out: head.0.weight, head.2.weight")


def test_a_new_head_is_no_excuse_for_another_model() -> None:
    stored = state(small(5))
    stored["body.0.weight"] = torch.zeros(4, 7)
    with pytest.raises(ConfigError, match=r"made for another model \(1 with another shape: body\.0\.weight"):
        load_weights(small(3), {"": stored}, "w.pth", head=lambda: HEAD, new_head=True)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("googlenet", {"fc", "aux1.fc2", "aux2.fc2"}),
        ("inception_v3", {"fc", "AuxLogits.fc"}),
        ("fcn_resnet50", {"classifier.4", "aux_classifier.4"}),
        ("squeezenet1_1", {"classifier.1"}),
    ],
)
def test_auxiliary_heads_are_heads(name: str, head: set[str]) -> None:
    options = {"weights_backbone": None, "aux_loss": True} if name.startswith("fcn") else {}
    options |= {"init_weights": False, "aux_logits": True} if name in ("googlenet", "inception_v3") else {}

    def build(classes: int) -> nn.Module:
        model: nn.Module = torchvision.models.get_model(name, num_classes=classes, **options)
        return model

    with torch.device("meta"):
        model = build(64)  # as many as some layers have channels
    assert {tensor.rpartition(".")[0] for tensor in head_tensors(model, build, 64)} == head


def test_the_head_of_a_model_for_a_fixed_number_of_classes_is_its_last_module_of_that_size() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.scale = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.ones(1))

        def forward(self, input: Tensor) -> Tensor:
            scores: Tensor = self.head(self.body(input)) * self.scale
            return scores

    sequence = to_sequential(Net(), torch.zeros(2, 3))
    assert head_tensors(sequence, None, 3) == {"head.weight", "head.bias"}
    assert head_tensors(sequence, None, 7) == set()
