"""Check the components of a configuration before any of them is built, and say what the chosen engine is able to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from gpipe_cli.build.loader import data_arguments
from gpipe_cli.build.model import check_own_keys, model_arguments, own_keys
from gpipe_cli.build.optimizer import GROUPS, group_options, key_problems, optimizer_arguments
from gpipe_cli.config.instantiate import accepted_arguments, bind, instantiate
from gpipe_cli.config.keys import chosen_options, list_options
from gpipe_cli.config.schema import (
    COMPONENT_GROUPS,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from gpipe_cli.config.words import sets_key
from gpipe_cli.engines.protocol import EngineTraits, engine_traits
from gpipe_cli.errors import ConfigError
from gpipe_cli.launch.rank import is_rank
from gpipe_cli.report.output import print_status

# What a balance method may take as arguments; `within` is the memory model if there is a limit to respect.
BALANCE_ARGUMENTS = (
    "module",
    "layer_count",
    "partitions",
    "sample",
    "spec",
    "memory",
    "within",
    "profiles",
    "trained_micro_batches",
)


def check_components(settings: ModelConfig, overrides: Sequence[str]) -> None:
    """Check the arguments of every component; refuse keys that the engine would ignore."""
    if settings.uses_trained_weights and sets_key(overrides, "model.weights"):
        raise ConfigError(
            "model.weights: is where training starts, and this command uses trained weights; give weights=<file>"
        )
    offered = {
        "model": ("num_classes", "input_shape", "tokenizer", "class_names", "say"),
        "transform": ("data",),
        "balance": BALANCE_ARGUMENTS,
        "engine": ("spec",),
        "optimizer": ("params",),
    }
    for group in COMPONENT_GROUPS:
        if getattr(settings, group, None):
            node = _arguments(settings, group)
            bind(
                node,
                group,
                settings.allow,
                {name: None for name in offered.get(group, ()) if name not in node},
            )
    check_own_keys(own_keys(settings))
    if settings.optimizer:
        if problems := list(key_problems(settings.optimizer)):
            raise ConfigError("; ".join(problems))
        _check_groups(settings)
    if settings.engine:
        _check_engine(settings, overrides)


def _arguments(settings: ModelConfig, group: str) -> Mapping[str, Any]:
    """What the target of the group's component gets from the configuration."""
    if group == "model":
        return model_arguments(settings)
    if group == "data":
        return data_arguments(settings)
    node: Mapping[str, Any] = getattr(settings, group)
    return optimizer_arguments(node) if group == "optimizer" else node


def _check_groups(settings: ModelConfig) -> None:
    """Check the options of each parameter group as if they were those of the whole optimizer.

    torch itself checks the values that are for all parameters, but not those of a group.
    """
    node = optimizer_arguments(settings.optimizer)
    dummy = [nn.Parameter(torch.zeros(2, 2))]
    for index, group in enumerate(settings.optimizer.get(GROUPS) or []):
        path = f"optimizer.{GROUPS}[{index}]"
        options = {**node, **group_options(group)}
        instantiate(options, "optimizer", settings.allow, path=path, params=dummy)


def _check_engine(settings: ModelConfig, overrides: Sequence[str]) -> None:
    """Refuse settings that do not go with what the engine's module declares."""
    engine, traits = engine_name(settings), traits_of_engine(settings)
    for key in sorted(traits.ignored_keys):
        if not _is_given(settings, key, overrides):
            continue
        if sets_key(overrides, key) or not sets_key(overrides, "engine"):
            takers = "|".join(option.name for option in list_options("engine") if key not in option.ignores)
            raise ConfigError(f"{key}: has no effect with {engine}; remove it, or choose engine={takers}")
        print_status(f"{key}: set by the recipe, and without effect with {engine}")
    if traits.one_checkpoint_mode and isinstance(settings.checkpoint, list):
        raise ConfigError(
            f"checkpoint={settings.checkpoint}: {engine} has no partitions; give one mode for the whole model"
        )
    if settings.timeline is None:
        return
    default = f"engine={chosen_options('profile')['engine'].name}"
    has_keys = any(value is not None for key, value in settings.engine.items() if key != "_target_")
    if not settings.timeline and (engine != default or has_keys):
        raise ConfigError(f"{engine}: is for the steps that timeline=true runs; add it, or remove this")
    if not traits.has_timeline:
        raise ConfigError(f"{engine}: its steps cannot be recorded; remove it, which means {default}")


def _is_given(settings: ModelConfig, key: str, overrides: Sequence[str]) -> bool:
    """Whether the command line, or a recipe for a new run, sets the key.

    An evaluation or a resumed run has the settings of its run, and may use another engine.
    """
    if sets_key(overrides, key):
        return True
    if not settings.trains or settings.resume is not None:
        return False
    if key == "balance":
        return chosen_options("train")["balance"].name != balance_name(settings)
    value = attrgetter(key)
    return bool(value(settings) != value(TrainConfig()))


def traits_of_engine(settings: ModelConfig) -> EngineTraits:
    # Raises if the configuration may not name this target, before anything of it is imported.
    accepted_arguments(settings.engine, "engine", settings.allow)
    return engine_traits(settings.engine["_target_"])


def starts_ranks(settings: RunConfig) -> bool:
    """Whether this process has to start the ranks that run the job."""
    return traits_of_engine(settings).needs_processes and not is_rank()


def keeps_on_disk(settings: ModelConfig) -> bool:
    """Whether the engine keeps the model in a file, because it may be larger than memory."""
    return bool(settings.engine.get("to") == "disk")


def reads_on_demand(settings: RunConfig) -> bool:
    """Whether the engine reads saved tensors one by one: no process of it may have memory for all of them."""
    return keeps_on_disk(settings) or traits_of_engine(settings).needs_processes


def measures_layers(settings: ModelConfig) -> bool:
    """Whether the balance method may run the model."""
    return "sample" in accepted_arguments(settings.balance, "balance", settings.allow)


def needs_values(settings: ModelConfig) -> bool:
    """Whether the balance method cannot do without the values of the parameters."""
    return measures_layers(settings) and settings.balance.get("measure") != "auto"


def engine_name(settings: ModelConfig) -> str:
    return f"engine={settings.engine['_target_'].split('.')[-2]}"


def balance_name(settings: ModelConfig) -> str:
    """The module of the balance method, which is also the name of its option."""
    return str(settings.balance["_target_"].split(".")[-2])


def manual_balance(layers: Sequence[int]) -> dict[str, Any]:
    """The `balance` node of a balance that is already known."""
    return {"_target_": "gpipe_cli.balance.manual.balance", "layers": list(layers)}
