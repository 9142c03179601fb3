from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import yaml

from gpipe_cli.config.instantiate import accepted_arguments, instantiate, path_arguments, type_mismatch
from gpipe_cli.config.targets import check_targets
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.vision import torchvision
from tests.support.command_line import UserModule

FORBIDDEN = """
    os.system logging.os.system builtins.open builtins.eval subprocess.run pathlib.Path.unlink pickle.loads numpy.load
    torch.load torch.hub.load torch.utils.data.DataLoader torch.nn._reduction.warnings.warn torch.nn.__builtins__
    torchvision.models._utils.load_state_dict_from_url torchvision.datasets.CIFAR10 hydra.utils.instantiate
    yaml.unsafe_load gpipe_cli.cli.main gpipe_cli.runs.snapshots.load_weights torch.nnx.Linear torch ..
"""


@pytest.mark.parametrize("target", ["", *FORBIDDEN.split()])
@pytest.mark.parametrize("group", ["model", "data", "optimizer", "loss", "engine"])
def test_nothing_outside_the_allow_list_is_accepted(group: str, target: str) -> None:
    with pytest.raises(ConfigError):
        check_targets({group: {"_target_": target}})
    with pytest.raises(ConfigError):
        instantiate({"_target_": target}, group)


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn.modules.module.torch.load",
        "torch.nn.parallel.torch.load",
        "torch.nn.modules.module.Module.load_state_dict",
        "torch.nn.functional",
        "torchvision.models.ResNet18_Weights.DEFAULT.get_state_dict",
    ],
)
def test_a_path_that_leaves_the_allowed_modules_does_not_pass(target: str) -> None:
    with pytest.raises(ConfigError):
        instantiate({"_target_": target}, "model")


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "torch.nn.Sequential", "layers": [{"_target_": "os.system", "command": "true"}]},
        {"_target_": "torch.nn.Linear", "in_features": {"deep": {"_target_": "os.system"}}},
        {"_target_": "torch.nn.Linear", "_partial_": True},
        {"_target_": "torch.nn.Linear", "_args_": [1, 2]},
        {"_target_": ["os", "system"]},
        {"_target_": None},
    ],
)
def test_the_whole_tree_is_looked_at(node: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        check_targets({"model": node})


def test_a_group_that_builds_nothing_may_not_name_a_target() -> None:
    with pytest.raises(ConfigError, match="gpipe builds nothing from log"):
        check_targets({"log": {"_target_": "torch.nn.Linear"}})


def test_checking_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"imported {name}"))
    check_targets({"model": {"_target_": "torch.nn.Linear", "in_features": 2}})
    with pytest.raises(ConfigError, match=r"add 'allow=\[mypkg\]' to the command line"):
        check_targets({"model": {"_target_": "mypkg.build"}})


def test_an_alias_of_something_else_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name inside an allowed module may stand for anything; what it stands for is judged."""
    (tmp_path / "aliasing.py").write_text("from os import system as build\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"is not a class or function|is really posix.system"):
        instantiate({"_target_": "aliasing.build", "command": "true"}, "model", ["aliasing"])
    with pytest.raises(ConfigError, match=r"is really torch\.serialization\.load"):
        (tmp_path / "loading_alias.py").write_text("from torch import load as build\n")
        instantiate({"_target_": "loading_alias.build", "f": "x"}, "model", ["loading_alias"])


def test_own_packages_are_allowed_when_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_allowed.py").write_text(
        "from torch import nn\n\ndef build(width: int, num_classes: int):\n    return nn.Linear(width, num_classes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = {"_target_": "mine_allowed.build", "width": 3}
    made = instantiate(node, "model", ["mine_allowed"], num_classes=5, not_asked_for=1)
    assert (made.in_features, made.out_features) == (3, 5)
    assert accepted_arguments(node, "model", ["mine_allowed"]) == {"width", "num_classes"}
    sys.modules.pop("mine_allowed")


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (
            "model torch.nn.Linear in_feature=2",
            r"unknown key 'model.in_feature'.*did you mean 'in_features'",
        ),
        (
            "model torch.nn.Linear in_features=two out_features=2",
            "model.in_features=two: expected a whole number",
        ),
        ("model torch.nn.Linear in_features=2", "model.out_features: torch.nn.Linear needs it"),
        ("optimizer torch.optim.SGD lr=fast", "optimizer.lr=fast: expected a number"),
        ("optimizer torch.optim.SGD params=[1]", "unknown key 'optimizer.params'"),
        ("optimizer torch.optim.SGD lr=-1", "torch.optim.SGD rejects these values: Invalid learning rate"),
    ],
)
def test_arguments_are_held_against_the_signature_and_by_the_target(node: str, says: str) -> None:
    group, target, *arguments = node.split()
    offered = {"params": [torch.nn.Parameter(torch.zeros(1))]} if group == "optimizer" else {}
    values = {key: yaml.safe_load(value) for key, value in (word.split("=") for word in arguments)}
    with pytest.raises(ConfigError, match=says):
        instantiate({"_target_": target, **values}, group, **offered)


def test_nested_components_are_built_too() -> None:
    layer = {"_target_": "torch.nn.TransformerEncoderLayer", "d_model": 8, "nhead": 2, "batch_first": True}
    node = {"_target_": "torch.nn.TransformerEncoder", "encoder_layer": layer, "num_layers": 1}
    assert isinstance(instantiate(node, "model"), torch.nn.TransformerEncoder)


def test_components_in_a_list_are_built_too() -> None:
    layer = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}
    made = instantiate({"_target_": "torch.nn.ModuleList", "modules": [layer, layer]}, "model")
    assert [type(built) for built in made] == [torch.nn.Linear] * 2
    assert made[0] is not made[1]


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "torchvision.models.resnet18", "weights": "DEFAULT"},
        {"_target_": "torchvision.models.resnet18", "pretrained": True},
        {"_target_": "torchvision.models.get_model", "name": "resnet18", "weights": "DEFAULT"},
        {"_target_": "torchvision.datasets.MNIST", "root": ".", "download": True},
    ],
)
def test_an_argument_that_would_download_is_refused(node: dict[str, Any]) -> None:
    group = "data" if "datasets" in node["_target_"] else "model"
    with pytest.raises(ConfigError, match=r"would download|does not take it"):
        instantiate(node, group)


def test_a_default_that_would_download_is_replaced() -> None:
    node = {"_target_": "torchvision.models.segmentation.lraspp_mobilenet_v3_large"}
    with torch.device("meta"):
        assert instantiate(node, "model") is not None


def test_no_builder_of_torchvision_has_a_default_that_would_download_under_another_name() -> None:
    """get_model passed weights_backbone=ResNet50_Weights.DEFAULT to fcn_resnet50, which opened a connection."""
    models = torchvision.models
    for name in models.list_models():
        for key, parameter in inspect.signature(models.get_model_builder(name)).parameters.items():
            assert not isinstance(parameter.default, models.WeightsEnum) or key.startswith("weights"), (
                name,
                key,
            )


def test_a_model_that_torchvision_is_asked_for_by_name_comes_without_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torchvision.models.WeightsEnum, "get_state_dict", lambda *args, **kwargs: pytest.fail("downloads")
    )
    node = {"_target_": "torchvision.models.get_model", "name": "fcn_resnet50"}
    with torch.device("meta"):
        assert instantiate(node, "model") is not None
    with pytest.raises(ConfigError, match=r"model.weights_backbone=DEFAULT: .* would download"):
        instantiate({**node, "weights_backbone": "DEFAULT"}, "model")


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "torch.nn.Linear", "in_features": -1, "out_features": 2},
        {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 2, "device": "nope"},
        {"_target_": "torch.nn.MultiheadAttention", "embed_dim": 7, "num_heads": 2},
        {"_target_": "torch.nn.ModuleDict", "modules": {"a.b": {"_target_": "torch.nn.ReLU"}}},
        {"_target_": "torchvision.models.ResNet", "block": 3, "layers": [1, 1, 1, 1]},
        {"_target_": "torchvision.models.vit_b_16", "image_size": 7},
    ],
)
def test_whatever_torch_raises_over_its_arguments_is_about_the_configuration(node: dict[str, Any]) -> None:
    """A RuntimeError, a KeyError or an assertion of torch ended the command with 1 and a hint at --debug."""
    with pytest.raises(ConfigError, match="rejects these values"):
        instantiate(node, "model")


def test_a_dataset_that_is_not_there_is_an_error_of_the_data() -> None:
    node = {"_target_": "torchvision.datasets.ImageFolder", "root": "/nowhere"}
    with pytest.raises(DataError, match="nowhere"):
        instantiate(node, "data")


@pytest.mark.parametrize(
    ("annotation", "values"),
    [
        (int, [1]),
        (float, [1, 1.5]),
        (bool, [True]),
        (str, ["x"]),
        (int | None, [None, 3]),
        (float | torch.Tensor, [0.1]),
        (list[int], [[1]]),
        (tuple[int, int], [[1, 2]]),
        (Sequence[int], [[1]]),
        (dict[str, Any], [{"a": 1}]),
        (Any, ["anything"]),
        (Path, ["a/b"]),
        (None, [None]),
    ],
)
def test_what_fits_passes(annotation: Any, values: list[Any]) -> None:
    assert [type_mismatch(value, annotation) for value in values] == [None] * len(values)


@pytest.mark.parametrize(
    ("annotation", "values", "says"),
    [
        (int, ["x", 1.5, True], "expected a whole number"),
        (float, ["x", True, None], "expected a number"),
        (float | torch.Tensor, ["x"], "expected a number"),
        (bool, [1], "expected true or false"),
        (str | None, [1], "expected text or null"),
        (list[int], [3], "expected a list in brackets, such as [1,2]"),
        (dict[str, int], [[1]], "expected a mapping"),
    ],
)
def test_what_does_not_fit_is_told_in_plain_words(annotation: Any, values: list[Any], says: str) -> None:
    assert {type_mismatch(value, annotation) for value in values} == {says}


def test_models_of_transformers_and_timm_are_built_if_they_are_allowed() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    config = {"_target_": "transformers.LlamaConfig", "intermediate_size": 16, **sizes}
    llama = {"_target_": "transformers.LlamaForCausalLM", "config": config}
    assert len(instantiate(llama, "model", ["transformers"]).model.layers) == 2
    resnet = {"_target_": "timm.create_model", "model_name": "test_resnet", "num_classes": 3}
    assert instantiate(resnet, "model", ["timm"]).fc.out_features == 3
    for node in (llama, resnet):
        with pytest.raises(ConfigError, match=r"^add 'allow=\[.* not allowed here"):
            instantiate(node, "model", [])


def test_the_annotation_of_an_argument_says_that_it_is_a_path(
    user_module: UserModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def paths(target: str, **arguments: Any) -> list[str]:
        return [*path_arguments({"_target_": target, **arguments}, "data", ["mine"], "data")]

    code = """
        from pathlib import Path
        def build(root: Path, url: str, *, files: list[Path] | None, cache: Path | str = ""):
            return root / url, files, cache
    """
    monkeypatch.syspath_prepend(user_module("mine", dedent(code)).parent)
    arguments = {"root": "a", "url": "b", "files": ["c", "d"], "cache": "e"}
    keys = ["data.root", "data.files[0]", "data.files[1]", "data.cache"]
    assert paths("mine.build", **arguments) == keys
    built = instantiate({"_target_": "mine.build", **arguments}, "data", ["mine"])
    assert built == (Path("a/b"), [Path("c"), Path("d")], "e"), "text where the annotation has both"
    train = {"_target_": "torchvision.datasets.ImageFolder", "root": "images"}
    assert paths("gpipe_cli.data.pair.build", train=train, classes=2) == ["data.train.root"]
    names = dict.fromkeys(("path", "field", "tokenizer", "cache"), "a")
    assert paths("gpipe_cli.data.texts.build_text_files", **names) == [
        "data.path",
        "data.tokenizer",
        "data.cache",
    ]
