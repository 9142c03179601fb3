"""Which classes and functions a configuration may name in `_target_`.

A configuration is data, perhaps somebody else's. gpipe judges every `_target_` by its name before it imports
anything, and judges the imported object again. From gpipe_cli, a group accepts exactly the builders that its YAML
files under conf/ name, so a new component is still one .py and one .yaml. From torch and torchvision it accepts a
kind of object: layers, losses, optimizers, registered model builders. The module that a name sits in proves nothing:
`torch.nn` also contains `torch`, and `gpipe_cli.engines` also contains functions that open files. The few functions
that a list of layers may call (`{call: torch.flatten}`) are listed in build/model.py.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gpipe_cli.config.keys import list_options
from gpipe_cli.config.schema import COMPONENT_GROUPS
from gpipe_cli.config.words import SHIPPED
from gpipe_cli.errors import ConfigError, did_you_mean, or_list
from gpipe_cli.huggingface import import_package
from gpipe_cli.values import flatten

DATASETS = ("FakeData", "ImageFolder", "MNIST", "FashionMNIST", "KMNIST")
"""The torchvision datasets that unpickle nothing but tensors."""
REMOVED_TABLES = (
    "data=csv and predictions for tables were removed from gpipe; read the rows with a custom dataset, such as "
    "data=mydata:build"
)
REMOVED = {"gpipe_cli.data.csv_table.build": REMOVED_TABLES}
"""Targets that runs of earlier versions name, and what is left to do."""
MOVED = {
    "gpipe_cli.data.cifar.build": "gpipe_cli.data.images.build_cifar",
    "gpipe_cli.data.digits.build": "gpipe_cli.data.images.build_digits",
    "gpipe_cli.data.jsonl.build": "gpipe_cli.data.texts.build_rows",
    "gpipe_cli.data.mnist.build": "gpipe_cli.data.images.build_mnist",
    "gpipe_cli.data.shapes.build": "gpipe_cli.data.generated.build_shapes",
    "gpipe_cli.data.synthetic.build": "gpipe_cli.data.generated.build_synthetic",
    "gpipe_cli.data.text.build": "gpipe_cli.data.texts.build_text_files",
    "gpipe_cli.data.texts.build_jsonl": "gpipe_cli.data.texts.build_rows",
    "gpipe_cli.data.texts.build_text": "gpipe_cli.data.texts.build_text_files",
    "gpipe_cli.loggers.none.build": "gpipe_cli.loggers.protocol.NoLogger",
    "gpipe_cli.losses.auxiliary.AuxiliaryCrossEntropy": "gpipe_cli.losses.cross_entropy.AuxiliaryCrossEntropy",
    "gpipe_cli.losses.token_cross_entropy.TokenCrossEntropy": "gpipe_cli.losses.cross_entropy.TokenCrossEntropy",
    "gpipe_cli.models.hf.model.build": "gpipe_cli.models.hf.pretrained.build",
}
"""Targets that files of earlier versions name, and what they are called now."""
_TEXTS = ("gpipe_cli.data.texts.build_rows", "gpipe_cli.data.texts.build_text_files")
"""Under their earlier names they packed documents as data.pack=joined does now."""
_NAME = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+")  # dotted, no private segment


LIBRARIES = {
    "model": ("a layer of torch.nn, a model of torchvision.models", ("torch.nn.", "torchvision.models.")),
    "loss": ("a loss of torch.nn", ("torch.nn.",)),
    "optimizer": ("an optimizer of torch.optim", ("torch.optim.",)),
    "data": (
        f"one of torchvision.datasets.{{{','.join(DATASETS)}}}",
        tuple(f"torchvision.datasets.{name}" for name in DATASETS),
    ),
}
"""What a group accepts from torch and torchvision, and how the names begin; `_is_of_kind` judges the objects."""


def current_name(target: Any) -> Any:
    return MOVED.get(target, target) if isinstance(target, str) else target


def with_current_names(node: Any) -> Any:
    """The node with every target that has moved under its new name."""
    if isinstance(node, list):
        return [with_current_names(value) for value in node]
    if not isinstance(node, dict):
        return node
    target = node.get("_target_")
    named = {
        key: current_name(value) if key == "_target_" else with_current_names(value)
        for key, value in node.items()
    }
    if target in MOVED and current_name(target) in _TEXTS and node.get("pack", True) is True:
        named["pack"] = "joined"
    return named


def check_targets(tree: Mapping[str, Any], allow: Sequence[str] = ()) -> None:
    """Reject a tree that names a target its group does not accept, without importing anything."""
    for group, node in tree.items():
        for path, value in flatten(node, group, inner=True):
            key = path.rpartition(".")[2]
            if key == "_target_":
                check_target_name(path, value, group, allow)
            elif key.startswith("_") and key.endswith("_"):
                raise ConfigError(f"{path}: not supported; a node has a _target_ and its arguments")


def check_target_name(path: str, target: Any, group: str, allow: Sequence[str]) -> None:
    target = current_name(target)
    if group not in COMPONENT_GROUPS:
        raise ConfigError(f"{path}={target}: gpipe builds nothing from {group}; remove the _target_")
    if not isinstance(target, str) or not _NAME.fullmatch(target):
        raise ConfigError(
            f"{path}={target}: give the dotted name of a class or function, such as mypkg.net.build"
        )
    if target in REMOVED:
        raise ConfigError(f"{path}={target}: {REMOVED[target]}")
    if not accepts_name(target, group) and not is_trusted(target, allow):
        raise ConfigError(_refusal(f"{path}={target}: ", group, target))


def resolve_target(path: str, target: Any, group: str, allow: Sequence[str]) -> Callable[..., Any]:
    """Judge the name and import the target, and make sure that the object behind the name is one the group accepts."""
    target = current_name(target)
    check_target_name(path, target, group, allow)
    owner_name, _, attribute = target.rpartition(".")
    package = owner_name.partition(".")[0]
    if package in ("torchvision", "timm"):
        importlib.import_module("gpipe_cli.vision")  # makes torchvision importable next to a CPU-only torch
    if package == "transformers":
        import_package(package)  # downloads nothing from now on
    try:
        owner = _import_owner(owner_name, may_be_class=is_trusted(target, allow))
    except ImportError as error:
        raise ConfigError(f"{path}={target}: {error}; gpipe also searches the current folder") from error
    resolved = getattr(owner, attribute, None)
    if resolved is None:
        public = [name for name in vars(owner) if not name.startswith("_")]
        raise ConfigError(f"{path}={target}: {owner_name} has no {attribute}; {or_list(attribute, public)}")
    if not (inspect.isclass(resolved) or inspect.isfunction(resolved) or inspect.ismethod(resolved)):
        raise ConfigError(f"{path}={target}: is not a class or function")
    # A name in a trusted module may be an alias of anything, so the place of its definition must be trusted too.
    home = f"{resolved.__module__}.{resolved.__qualname__}"
    trusted = is_trusted(target, allow) and is_trusted(home, allow)
    if not trusted and not accepts_object(target, resolved, group):
        raise ConfigError(_refusal(f"{path}={target}: is really {home}, which is ", group, home))
    return resolved


def _import_owner(name: str, may_be_class: bool) -> Any:
    """The module of that name, or a class in a module, for a class method such as AutoModel.from_pretrained."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        module_name, _, class_name = name.rpartition(".")
        if not may_be_class or not module_name or error.name != name:
            raise
        owner = getattr(importlib.import_module(module_name), class_name, None)
        if not inspect.isclass(owner):
            raise
        return owner


def add_current_folder(allow: Sequence[str]) -> None:
    """Make the current folder importable, because allowed packages may be in it."""
    folder = str(Path.cwd())
    if allow and folder not in sys.path:
        sys.path.insert(0, folder)


def is_trusted(name: str, allow: Sequence[str]) -> bool:
    """Whether the command line allows the module or package that the name is in."""
    return name.startswith(tuple(f"{package}." for package in allow))


def accepts_name(target: str, group: str) -> bool:
    """Whether the group may accept the target, judged by its name alone; imports nothing."""
    _, prefixes = LIBRARIES.get(group, ("", ()))
    return target in own_targets(group) or target.startswith(prefixes)


def accepts_object(target: str, resolved: Any, group: str) -> bool:
    """Whether the group accepts the object that the target resolved to."""
    return target in own_targets(group) or (group in LIBRARIES and _is_of_kind(resolved, group))


@cache
def own_targets(group: str) -> frozenset[str]:
    return frozenset(option.target for option in list_options(group) if option.target is not None)


def _refusal(given: str, group: str, target: str) -> str:
    """Why the target is refused, and what to type to allow it."""
    root = target.partition(".")[0]
    if root not in SHIPPED:
        return f"add 'allow=[{root}]' to the command line if you trust {root}; {given}not allowed here"
    accepted = ", ".join([*LIBRARIES.get(group, ())[:1], *sorted(own_targets(group))])
    suggestion = did_you_mean(target, own_targets(group))
    return "; ".join(filter(None, (f"{given}not allowed here", f"{group} accepts {accepted}", suggestion)))


def _is_of_kind(candidate: Any, group: str) -> bool:
    """Whether torch or torchvision define the object as one of the group's kind."""
    from torch import fx, nn, optim

    if group == "data" or (group == "model" and not inspect.isclass(candidate)):
        from gpipe_cli.vision import torchvision

        models, datasets = torchvision.models, torchvision.datasets
        builders = [models.get_model, *map(models.get_model_builder, models.list_models())]
        return candidate in (builders if group == "model" else [getattr(datasets, name) for name in DATASETS])
    # Wrappers for several devices and parametrizations are modules too, but are defined elsewhere.
    homes = {"loss": "torch.nn.modules.loss.", "optimizer": "torch.optim."}
    home = homes.get(group, ("torch.nn.modules.", "torchvision.models."))
    if not inspect.isclass(candidate) or not f"{candidate.__module__}.".startswith(home):
        return False
    # An Optimizer as such updates nothing, and a GraphModule compiles the code it is given.
    is_optimizer = issubclass(candidate, optim.Optimizer) and candidate is not optim.Optimizer
    is_module = issubclass(candidate, nn.Module) and not issubclass(candidate, fx.GraphModule)
    return is_optimizer if group == "optimizer" else is_module
