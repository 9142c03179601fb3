"""The parts every configured command puts together: data, model, partitions, engine.

Each function takes settings and gives an object; the commands call them from top to bottom.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from gpipe_cli.balance.memory import Memory
from gpipe_cli.balance.result import Balanced
from gpipe_cli.config.locate import default_options
from gpipe_cli.config.schema import (
    COMPONENT_GROUPS,
    CostConfig,
    EngineConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from gpipe_cli.config.targets import accepted, add_current_folder, bind, instantiate
from gpipe_cli.distributed.team import Team
from gpipe_cli.engines.devices import default_partitions, resolve_devices, set_threads
from gpipe_cli.engines.memory import memory_watched
from gpipe_cli.engines.protocol import Engine, Objective
from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.measures import measure_of
from gpipe_cli.offload.building import Built, built_on
from gpipe_cli.offload.tiers import DiskTier
from gpipe_cli.profiling.cache import ProfileCache, default_folder
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.report.output import say
from gpipe_cli.report.partitions import partition_rows
from gpipe_cli.run.away import keeps_on_disk, scratch_folder
from gpipe_cli.run.data import Feed, make_feed
from gpipe_cli.run.model import CUTTING_KEYS, as_sequence, check_layers
from gpipe_cli.run.pipeline_spec import (
    checkpoint_of,
    make_course,
    make_memory,
    optimizer_factory,
    precision_of,
    sample_must_fit,
)
from gpipe_cli.run.sketch import sketched
from gpipe_cli.schedule import names, one_f_one_b, traits
from gpipe_cli.schedule.pipeline_spec import PipelineSpec

# Keys that only some engines use, each with the argument of an engine's `build` that shows it does.
ENGINE_KEYS = {
    "balance": "balance",
    "partitions": "balance",
    "device_memory": "balance",
    "schedule": "schedule",
    "checkpoint": "checkpoint",
    "step_timeout": "step_timeout",
    "deferred_batch_norm": "deferred_batch_norm",
    "data_parallel": "data_parallel",
    "log.layers": "log_layers",
    "log.partitions": "log_layers",
}

FOR_A_MODEL = "choose a smaller model, or keep it on disk with engine=offload engine.to=disk"

# What a balance method may ask for; `within` is the memory to keep within, where a limit is given.
BALANCE_OFFERS = ("module", "layer_count", "partitions", "sample", "spec", "memory", "within", "profiles")


@dataclass(frozen=True)
class Split:
    """A model cut into partitions."""

    balanced: Balanced
    devices: list[torch.device]
    spec: PipelineSpec
    memory: Memory | None = None
    """What partitions need, where that had to be known."""
    origin: str = ""
    """Where the costs come from, if that is worth a word."""

    @property
    def balance(self) -> list[int]:
        return self.balanced.layers


@dataclass(frozen=True)
class Assembly:
    """What every configured command starts from."""

    feed: Feed
    model: nn.Sequential
    split: Split
    built: Built[nn.Sequential] | None = None
    """Where the model's numbers are, if they are not in memory."""

    @property
    def partitions(self) -> list[dict[str, Any]]:
        """A row per partition, for people and for JSON."""
        return partition_rows(self.model, self.split.balance, self.split.devices)


def assemble(settings: ModelConfig, overrides: Sequence[str], *, storage: bool = True) -> Assembly:
    """Check every component, then make data, model and partitions; the model with or without its numbers."""
    add_current_folder(settings.allow)
    check_components(settings, overrides)
    feed = make_feed(settings)

    def make() -> nn.Sequential:
        return make_model(settings, feed)

    if storage and isinstance(settings, RunConfig) and keeps_on_disk(settings):
        built = built_on(DiskTier(scratch_folder(settings)), make)
        return Assembly(feed, built.model, split_model(settings, built.model, feed), built)
    model = make() if storage else sketched(make)
    return Assembly(feed, model, split_model(settings, model, feed))


@memory_watched("building the model", FOR_A_MODEL)
def make_model(settings: ModelConfig, feed: Feed) -> nn.Sequential:
    """The model, initialised from the seed; without `num_classes` it gets as many as the data has."""
    torch.manual_seed(settings.seed if isinstance(settings, TrainConfig) else 0)
    node = _chosen(settings, "model")
    offered: dict[str, Any] = {"input_shape": feed.data.shape}
    if "num_classes" not in node:
        offered["num_classes"] = feed.classes
    model = instantiate(node, "model", settings.allow, **offered)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model._target_={node['_target_']}: gives a {type(model).__name__}, an nn.Module is needed"
        )
    input, _ = feed.data.train[0]
    # Two samples: batch norm in training knows no single one.
    return as_sequence(model, _cutting(settings), torch.stack([input, input]))


@memory_watched("balancing the model")
def split_model(settings: ModelConfig, model: nn.Sequential, feed: Feed) -> Split:
    """The balance the settings ask for, and one device per partition."""
    if isinstance(settings, EngineConfig) and not uses_partitions(settings):
        return _undivided(settings, model)
    layers = settings.balance.get("layers")
    replicas = settings.data_parallel if isinstance(settings, RunConfig) else 1
    default = len(layers) if layers else default_partitions(settings.devices, replicas)
    partitions = settings.partitions or default
    if partitions > len(model):
        raise ConfigError(
            f"partitions={partitions}: the model has only {len(model)} layers; give at most that many"
        )
    everywhere = resolve_devices(settings.devices, partitions * replicas)
    width = len(everywhere) // replicas
    replica = Team.present().rank // max(1, width)
    devices = everywhere[replica * width : (replica + 1) * width]
    too_few = len(devices) < partitions and not traits(settings.schedule.name).several_per_device
    if too_few or len(devices) > partitions:
        raise ConfigError(
            f"devices={settings.devices}: {len(devices)} for {partitions} partitions; "
            f"one device per partition is needed "
            f"(only schedule={'|'.join(names(several_per_device=True))} puts several partitions on one)"
        )
    # Before anything is measured, so that it is as it will be trained.
    set_threads(settings.threads, everywhere)
    return _balance(settings, model, feed, devices, make_course(settings, partitions, devices))


def _balance(
    settings: ModelConfig, model: nn.Sequential, feed: Feed, devices: list[torch.device], spec: PipelineSpec
) -> Split:
    """By the method chosen, within the memory limit if there is one; only what the method asks for is made."""
    takes = accepted(settings.balance, "balance", settings.allow)
    limits = isinstance(settings, CostConfig) and settings.device_memory is not None
    offered: dict[str, Any] = {"module": model, "layer_count": len(model), "partitions": spec.partitions}
    memory = None
    # Whoever asks for a balance wants it measured; a run may use what was measured before.
    profiles = ProfileCache(default_folder(), reuse=isinstance(settings, RunConfig), say=say)
    with ExitStack() as judging:
        if limits or takes & {"sample", "memory"}:
            offered["sample"] = make_sample(settings, feed).to(devices[0])
            judging.enter_context(sample_must_fit(offered["sample"]))
            judging.enter_context(precision_of(settings, devices[0].type))
        if limits or "memory" in takes:
            memory = make_memory(settings, model, offered["sample"], spec)
        balanced: Balanced = instantiate(
            settings.balance,
            "balance",
            settings.allow,
            **offered,
            spec=spec,
            memory=memory,
            within=memory if limits else None,
            profiles=profiles,
        )
    if memory is not None and not memory.fits(
        balanced.layers
    ):  # one given by hand, or a method of the user's
        raise memory.refusal(balanced.layers)
    return Split(balanced, devices, spec, memory, profiles.origin)


def _undivided(settings: EngineConfig, model: nn.Sequential) -> Split:
    """All layers on one device, for an engine without partitions."""
    devices = resolve_devices(settings.devices, 1)
    if len(devices) > 1:
        raise ConfigError(f"devices={settings.devices}: {engine_name(settings)} runs on one device")
    set_threads(settings.threads, devices)
    # The engine runs forward and backward of each micro-batch before the next one, as 1f1b does on one device.
    spec = PipelineSpec(one_f_one_b.TRAITS.name, 1, min(settings.chunks, settings.batch_size))
    return Split(Balanced.of([len(model)], [1] * len(model), "layers"), devices, spec)


def measures(settings: ModelConfig) -> bool:
    """Whether the balance method runs the model, for which it needs its numbers."""
    return "sample" in accepted(settings.balance, "balance", settings.allow)


def make_sample(settings: ModelConfig, feed: Feed) -> Sample:
    """One micro-batch with its loss, to measure with."""
    input, target = feed.micro_batch(settings.chunks)
    return Sample(input, target, instantiate(settings.loss, "loss", settings.allow))


@memory_watched("building engine and optimizer", FOR_A_MODEL)
def make_engine(settings: RunConfig, parts: Assembly, *, gauged: bool = False) -> Engine:
    """The engine, with what its `build` asks for; gauged: somebody watches how busy its partitions are."""
    split = parts.split
    engine: Engine = instantiate(
        settings.engine,
        "engine",
        settings.allow,
        module=parts.model,
        objective=make_objective(settings),
        balance=split.balance,
        partitions=len(split.balance),
        devices=split.devices,
        device=split.devices[0],
        schedule=settings.schedule.name,
        chunks=settings.chunks,
        eval_chunks=settings.eval_chunks or settings.chunks,
        checkpoint=checkpoint_of(settings, len(split.balance)),
        deferred_batch_norm=isinstance(settings, TrainConfig) and settings.deferred_batch_norm,
        step_timeout=settings.step_timeout,
        data_parallel=settings.data_parallel,
        log_layers=isinstance(settings, TrainConfig) and settings.log.layers,
        gauged=gauged,
        scratch=scratch_folder(settings),
        make_sample=lambda: make_sample(settings, parts.feed),
        value_of=None if parts.built is None else parts.built.value_of,
    )
    if parts.built is not None:
        parts.built.close()
    return engine


def make_objective(settings: RunConfig) -> Objective:
    loss = instantiate(settings.loss, "loss", settings.allow)
    if not isinstance(settings, TrainConfig):
        return Objective(loss, measure_of(loss), precision=settings.precision)

    return Objective(
        loss,
        measure_of(loss),
        optimizer=optimizer_factory(settings),
        clip_grad_norm=settings.clip_grad_norm,
        precision=settings.precision,
    )


def check_components(settings: ModelConfig, overrides: Sequence[str]) -> None:
    """Look at the arguments of every component before any is built."""
    offers = {
        "model": dict.fromkeys(("num_classes", "input_shape")),
        "transform": {"data": None},
        "balance": dict.fromkeys(BALANCE_OFFERS),
        "engine": dict.fromkeys(_takes(settings)) if isinstance(settings, EngineConfig) else {},
        "optimizer": {"params": None},
    }
    for group in COMPONENT_GROUPS:
        if hasattr(settings, group):
            node = _chosen(settings, group)
            offered = {name: one for name, one in offers.get(group, {}).items() if name not in node}
            bind(node, group, settings.allow, offered)
    check_layers(_cutting(settings))
    if isinstance(settings, EngineConfig):
        _refuse_unused(settings, overrides)


def _refuse_unused(settings: EngineConfig, overrides: Sequence[str]) -> None:
    """A key the engine does not look at, if given, is a mistake."""
    takes = _takes(settings)
    for key, argument in ENGINE_KEYS.items():
        if argument not in takes and _is_given(settings, key, overrides):
            raise ConfigError(f"{key}: has no effect with {engine_name(settings)}; leave it out")


def _chosen(settings: ModelConfig, group: str) -> dict[str, Any]:
    """A component's node; a `num_classes` of null is left to the data."""
    node: dict[str, Any] = getattr(settings, group)
    cutting = _cutting(settings) if group == "model" else {}
    return {
        key: value
        for key, value in node.items()
        if key not in cutting and (key != "num_classes" or value is not None)
    }


def _cutting(settings: ModelConfig) -> dict[str, Any]:
    """What the model's node says about its layers, where the model's target does not see to that itself."""
    node: dict[str, Any] = settings.model
    if not any(key in node for key in CUTTING_KEYS):
        return {}
    own = accepted(node, "model", settings.allow)
    return {key: node[key] for key in CUTTING_KEYS if key in node and key not in own}


def uses_partitions(settings: EngineConfig) -> bool:
    """Whether the engine divides the model at all."""
    return "balance" in _takes(settings)


def runs_in_ranks(settings: EngineConfig) -> bool:
    """Whether the engine runs in several processes, which somebody has to start."""
    return "max_restarts" in _takes(settings)


def _takes(settings: EngineConfig) -> frozenset[str]:
    return accepted(settings.engine, "engine", settings.allow)


def engine_name(settings: EngineConfig) -> str:
    return f"engine={settings.engine['_target_'].split('.')[-2]}"


def balance_name(settings: ModelConfig) -> str:
    """The method's file, which is the name of its option too."""
    return str(settings.balance["_target_"].split(".")[-2])


def _is_given(settings: EngineConfig, key: str, overrides: Sequence[str]) -> bool:
    """On the command line, or by a recipe that moved it from its default.

    An evaluation, or a resumed run, has the settings of its run, which nobody gave it.
    """
    if any(re.match(rf"[+~]*{re.escape(key)}[.=]", word) for word in overrides):
        return True
    if not isinstance(settings, TrainConfig) or settings.resume is not None:
        return False
    if key == "balance":
        return default_options("train")["balance"].name != balance_name(settings)
    value = attrgetter(key)
    return bool(value(settings) != value(TrainConfig()))
