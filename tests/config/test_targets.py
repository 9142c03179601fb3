"""Every public callable of gpipe_cli, torch and torchvision, and which group's `_target_` it may be."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import gpipe_cli
from gpipe_cli.config.instantiate import accepted_arguments
from gpipe_cli.config.schema import COMPONENT_GROUPS
from gpipe_cli.config.targets import (
    DATASETS,
    MOVED,
    accepts_name,
    accepts_object,
    own_targets,
    resolve_target,
    with_current_names,
)
from gpipe_cli.errors import ConfigError
from gpipe_cli.vision import torchvision

OURS = """
model: models.amoebanetd.build models.gpt.build models.hf.pretrained.build models.mlp.build
    models.resnet.build models.timm_zoo.build models.torchvision_zoo.build models.unet.build
    models.unet.build_standard
data: data.generated.build_shapes data.generated.build_synthetic data.image_folder.build
    data.images.build_cifar data.images.build_digits data.images.build_mnist data.pair.build
    data.texts.build_rows data.texts.build_text_files
transform: data.transforms.augment data.transforms.basic data.transforms.none
loss: losses.cross_entropy.AuxiliaryCrossEntropy losses.cross_entropy.CrossEntropy
    losses.cross_entropy.TokenCrossEntropy losses.dice.Dice losses.mse.MeanSquaredError losses.own.OwnLoss
balance: balance.manual.balance balance.params.balance balance.size.balance balance.time.balance
    balance.uniform.balance
engine: engines.offload.build engines.processes.build engines.single.build engines.threads.build
optimizer:
lr_schedule: training.lr_schedules.Constant training.lr_schedules.Cosine training.lr_schedules.OneCycle
    training.lr_schedules.Step training.lr_schedules.Linear
logger: loggers.mlflow.build loggers.protocol.NoLogger loggers.tensorboard.build loggers.wandb.build
"""
"""What runs save in their config.yaml: a name may only go away if MOVED has it, and none be added unseen."""


def ours(group: str) -> set[str]:
    (names,) = re.findall(rf"^{group}:((?:\s+\S+\.\S+)*)", OURS, flags=re.MULTILINE)
    return {f"gpipe_cli.{name}" for name in str(names).split()}


def modules() -> Iterator[ModuleType]:
    """All of gpipe_cli and torchvision, and what of torch they import."""
    for package in (gpipe_cli, torchvision.models, torchvision.datasets, torch.nn, torch.optim):
        for info in pkgutil.walk_packages(
            package.__path__, f"{package.__name__}.", onerror=lambda name: None
        ):
            if "._" not in info.name and "__main__" not in info.name:
                importlib.import_module(info.name)
    roots = ("gpipe_cli", "torch", "torchvision")
    yield from [
        module for name, module in sys.modules.items() if name.partition(".")[0] in roots and "._" not in name
    ]


@pytest.fixture(scope="module")
def callables() -> dict[str, Any]:
    return {
        f"{module.__name__}.{name}": value
        for module in modules()
        for name, value in list(vars(module).items())
        if not name.startswith("_") and callable(value)
    }


def admitted(callables: dict[str, Any], group: str) -> dict[str, Any]:
    return {
        name: value
        for name, value in callables.items()
        if accepts_name(name, group)
        and (inspect.isclass(value) or inspect.isfunction(value))
        and accepts_object(name, value, group)
    }


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_target_that_has_moved_is_the_component_that_it_was(old: str, new: str) -> None:
    (group,) = (group for group in COMPONENT_GROUPS if new in own_targets(group))
    assert resolve_target(f"{group}._target_", old, group, ()).__name__ == new.rpartition(".")[2]


@pytest.mark.parametrize(
    ("target", "pack", "now"),
    [
        ("build_jsonl", True, "joined"),
        ("build_text", None, "joined"),
        ("build_text", False, False),
        ("build_rows", True, True),
    ],
)
def test_texts_that_were_packed_before_documents_were_kept_apart_see_each_other(
    target: str, pack: bool | None, now: object
) -> None:
    node = {"_target_": f"gpipe_cli.data.texts.{target}", **({} if pack is None else {"pack": pack})}
    read = with_current_names({"data": node})["data"]
    assert read["pack"] == now and read["_target_"].endswith(("build_rows", "build_text_files"))


@pytest.mark.parametrize("group", COMPONENT_GROUPS)
def test_of_gpipe_a_group_takes_exactly_its_builders(callables: dict[str, Any], group: str) -> None:
    assert len(callables) > 10_000
    assert {name for name in admitted(callables, group) if name.startswith("gpipe_cli.")} == ours(group)


@pytest.mark.parametrize("group", COMPONENT_GROUPS)
def test_of_torch_and_torchvision_a_group_takes_a_kind(callables: dict[str, Any], group: str) -> None:
    foreign = {
        value for name, value in admitted(callables, group).items() if not name.startswith("gpipe_cli.")
    }
    layers = {
        target for target in vars(nn).values() if inspect.isclass(target) and issubclass(target, nn.Module)
    }
    builders = {torchvision.models.get_model_builder(name) for name in torchvision.models.list_models()}
    if group == "model":
        assert foreign >= (layers - {nn.DataParallel}) | builders | {torchvision.models.get_model}
        functions = {target for target in foreign if not inspect.isclass(target)}
        assert functions == builders | {torchvision.models.get_model}
        assert all(issubclass(target, nn.Module) for target in foreign - functions)
        assert not {nn.DataParallel, nn.parallel.DistributedDataParallel, nn.Parameter} & foreign
    elif group == "loss":
        assert foreign <= layers | {
            target for target in foreign if target.__module__ == "torch.nn.modules.loss"
        }
        assert {nn.CrossEntropyLoss, nn.L1Loss, nn.CTCLoss} < foreign and nn.Linear not in foreign
    elif group == "optimizer":
        assert foreign == {
            target
            for target in vars(torch.optim).values()
            if inspect.isclass(target)
            and issubclass(target, torch.optim.Optimizer)
            and target is not torch.optim.Optimizer
        }
    elif group == "data":
        assert {target.__name__ for target in foreign} == {*DATASETS}
    else:
        assert not foreign


@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("engine", "gpipe_cli.launch.rank_files.Heartbeats"),
        ("balance", "gpipe_cli.balance.time.measured"),
        ("data", "torchvision.datasets.CIFAR10"),
        ("model", "gpipe_cli.models.weights.read_weights"),
        ("model", "torch.nn.init.xavier_uniform_"),
        ("model", "torch.nn.parallel.DistributedDataParallel"),
        ("model", "torchvision.models.get_weight"),
        ("loss", "torch.nn.Linear"),
        ("optimizer", "torch.optim.Optimizer"),
    ],
)
def test_what_is_something_else_is_refused_although_it_lives_nearby(group: str, target: str) -> None:
    """A recipe named launch.rank_files.Heartbeats as its engine, whose constructor emptied the file it was given."""
    with pytest.raises(ConfigError, match=rf"not allowed here(; {group} accepts|$)|has no|No module named"):
        accepted_arguments({"_target_": target}, group)


def test_a_class_method_is_a_target_if_the_command_line_allows_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers.AutoModelForCausalLM.from_pretrained."""
    source = "class Net:\n    @classmethod\n    def load(cls, path): ...\nfrom pathlib import Path\n"
    (tmp_path / "loadable_net.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    allow = ["loadable_net"]
    assert accepted_arguments({"_target_": "loadable_net.Net.load"}, "model", allow) == {"path"}
    for target, problem in {
        "loadable_net.Net.save": "loadable_net.Net has no save",
        "loadable_net.Nets.load": "No module named 'loadable_net.Nets'",
        "loadable_net.Path.home": "is really pathlib.Path.home, which is not allowed here",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            accepted_arguments({"_target_": target}, "model", allow)
    with pytest.raises(ConfigError, match=r"No module named 'torch\.nn\.Linear'"):
        accepted_arguments({"_target_": "torch.nn.Linear.register_module_forward_hook"}, "model")
