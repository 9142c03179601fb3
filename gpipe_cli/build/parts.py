"""Build the parts of a run from its settings: data, model, partitions and engine, in this order."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.accelerator.devices import default_partitions, free_host_bytes, resolve_devices, set_threads
from gpipe_cli.activity import activity
from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.result import BalanceResult
from gpipe_cli.balance.time import LEAST_RUNS, measured_runs
from gpipe_cli.build.components import (
    check_components,
    engine_name,
    keeps_on_disk,
    needs_values,
    traits_of_engine,
)
from gpipe_cli.build.custom_schedule import (
    has_custom_order,
    known_schedule,
    order_still_fits,
    read_given_file,
)
from gpipe_cli.build.fit import LEAST_ROWS, check_task, with_least_rows
from gpipe_cli.build.loader import BatchLoader, make_loader
from gpipe_cli.build.model import ConfiguredModel, build_deferred, build_on_meta, make_model
from gpipe_cli.build.optimizer import optimizer_factory, parameter_groups
from gpipe_cli.build.step import (
    autocast_of,
    checkpoint_mode,
    make_loss,
    make_memory,
    make_pipeline_spec,
    make_sample,
    metrics_of,
    sample_must_fit,
)
from gpipe_cli.config.instantiate import accepted_arguments, instantiate
from gpipe_cli.config.schema import (
    ModelConfig,
    RunConfig,
)
from gpipe_cli.config.targets import add_current_folder
from gpipe_cli.data.datasets import Data
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine, EngineSpec, TrainingObjective
from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.blocks import blocked_linear
from gpipe_cli.losses.own import OwnLoss
from gpipe_cli.pipeline.microbatch import micro_batches
from gpipe_cli.profiling.profile_cache import ProfileCache, default_folder
from gpipe_cli.profiling.records import has_values
from gpipe_cli.report.model_tables import partition_rows
from gpipe_cli.report.output import print_status
from gpipe_cli.runs.directory import planned_run_directory
from gpipe_cli.runs.snapshots.record import BaseWeights
from gpipe_cli.schedule import names
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.orders import AUTO, CUSTOM, FILE, ONE_F_ONE_B, may_share_devices, one_by_one
from gpipe_cli.schedule.spec import PipelineSpec
from gpipe_cli.sequential.deferred import fill_others
from gpipe_cli.torch_internals.deferred_values import DeferredValues
from gpipe_cli.torch_internals.modules import compile_layers
from gpipe_cli.values import format_bytes

MEASURE_HINT = "try more chunks, a smaller batch_size, or balance=size, which runs nothing"


@dataclass(frozen=True)
class Partitioning:
    """How the model is divided into partitions, and on which devices they are."""

    balanced: BalanceResult
    devices: list[torch.device]
    spec: PipelineSpec
    memory: MemoryObjective | None = None
    """What partitions need, if the balance method or a memory limit asked for it."""
    origin: str = ""
    """Where measured costs come from, for the log."""

    @property
    def balance(self) -> list[int]:
        return self.balanced.layers

    def print_origin(self, write: Callable[[str], None] = print_status) -> None:
        if self.origin:
            write(f"balance {self.balance}: {self.origin}")

    @property
    def workers(self) -> tuple[int, ...]:
        """The worker of each partition: an index into `devices`."""
        return self.spec.traits.placement(len(self.balance), len(self.devices))

    @property
    def placed_devices(self) -> list[torch.device]:
        """The device of each partition."""
        return [self.devices[worker] for worker in self.workers]


@dataclass(frozen=True)
class RunParts:
    loader: BatchLoader
    model: nn.Sequential
    partitioning: Partitioning
    made: ConfiguredModel
    """The model as it was made, of which `model` may be a copy without storage, and what is known of it."""
    values: DeferredValues | None = None
    """How to compute the large buffers of a model that has no memory for them yet."""

    @property
    def base(self) -> BaseWeights | None:
        return self.made.base

    @property
    def referenced(self) -> frozenset[str]:
        """The names of parameters that snapshots leave out."""
        return frozenset() if self.base is None else self.base.parameters

    @property
    def partitions(self) -> list[dict[str, Any]]:
        """A row per partition, for tables and JSON."""
        return partition_rows(self.model, self.partitioning.balance, self.partitioning.placed_devices)


@dataclass(frozen=True)
class BuiltModel:
    """Data and a model with values, that fit each other."""

    loader: BatchLoader
    made: ConfiguredModel


def build_model(settings: ModelConfig, *, initial_weights: bool = True) -> BuiltModel:
    """Build the data and the model of a run whose model is measured before it is partitioned."""
    loader = make_loader(settings)
    made = make_model(settings, loader, initial_weights=initial_weights)
    return BuiltModel(with_least_rows(settings, loader, made.sequence), made)


def build_parts(
    settings: ModelConfig,
    overrides: Sequence[str],
    *,
    storage: bool = True,
    if_it_fits: bool = False,
    initial_weights: bool = True,
    deferred: bool = False,
    print_notes: bool = True,
    data: Data | None = None,
    order: FixedOrder | None = None,
    built: BuiltModel | None = None,
) -> RunParts:
    """Check every component, then build data, model and partitions; without `storage` the model has no values.

    if_it_fits: the model has values only if the run measures it, and if this machine has memory for it.
    initial_weights: as for `make_model`.
    deferred: the large tensors of the model get memory and values later; its parameters are deferred ones.
    print_notes: print what the user should know about the data.
    data: used instead of the configured one.
    order: that of schedule=auto or schedule=file, if it is known already.
    built: data and model, if they are built already.
    """
    add_current_folder(settings.allow)
    check_components(settings, overrides)
    if order is None and has_custom_order(settings) and settings.schedule.name == FILE:
        read_given_file(settings)  # refuses a wrong one before anything is built
    loader = make_loader(settings, data) if built is None else built.loader
    # An engine reads the parameters of its own layers; a balance method or a profile that runs the model needs all.
    runs_model = needs_values(settings) or (order is None and has_custom_order(settings))
    load = storage and (runs_model or not settings.runs_steps)

    made: list[ConfiguredModel] = []

    def make(values: DeferredValues | None = None) -> nn.Sequential:
        made.append(make_model(settings, loader, load=load, initial_weights=initial_weights, values=values))
        if settings.optimizer:
            # Refuses patterns that match nothing, before anything runs.
            parameter_groups(settings.optimizer, made[-1].sequence)
        return made[-1].sequence

    values = None
    on_disk = settings.runs_steps and keeps_on_disk(settings)
    if built is not None:
        made, model = [built.made], built.made.sequence
    elif storage and (deferred or on_disk):
        model, values = build_deferred(make)
        if on_disk and values is not None:
            fill_others([model], values)
    else:
        model = make() if storage and not if_it_fits else build_on_meta(make)
        is_measured = measured_runs(_trained_micro_batches(settings, loader)) >= LEAST_RUNS
        if if_it_fits and is_measured and _fits_in_memory(model):
            model = make()
    check_task(settings, loader, model)
    loader = with_least_rows(settings, loader, model)
    for note in loader.notes if print_notes else ():
        print_status(note)
    partitioning = partition_model(settings, model, loader, order)
    return RunParts(loader, model, partitioning, made[-1], values)


def _fits_in_memory(model: nn.Sequential) -> bool:
    """Whether the CPU can hold the values of a model, their gradients and as much again; print it if not."""
    needed = 3 * sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if needed <= (free := free_host_bytes()):
        return True
    print_status(
        f"measuring the layers would take {format_bytes(needed)}, and {format_bytes(free)} are free here: the "
        "partitions below are estimated, and may differ from the partitions of the run"
    )
    return False


@report_out_of_memory("balancing the model", MEASURE_HINT)
def partition_model(
    settings: ModelConfig, model: nn.Sequential, loader: BatchLoader, order: FixedOrder | None = None
) -> Partitioning:
    """Choose the devices of the partitions, balance the layers between them, and find the order if there is none."""
    activity.now("dividing the model into partitions")
    if settings.engine and not traits_of_engine(settings).has_partitions:
        devices = worker_devices(settings)
        if len(devices) > 1:
            raise ConfigError(f"devices={settings.devices}: {engine_name(settings)} runs on one device")
        set_threads(settings.threads, devices)
        # The engine runs forward and backward of each micro-batch before the next one, as 1f1b does on one device.
        spec = PipelineSpec(ONE_F_ONE_B, 1, loader.micro_batches(settings.chunks))
        return Partitioning(BalanceResult.of([len(model)], [1] * len(model), "layers"), devices, spec)
    partitions, replicas = _partitions_and_replicas(settings)
    if partitions > len(model):
        raise ConfigError(
            f"partitions={partitions}: the model has only {len(model)} layers; give at most that many"
        )
    all_devices = worker_devices(settings)
    width = len(all_devices) // replicas
    replica = World.current().rank // max(1, width)
    devices = all_devices[replica * width : (replica + 1) * width]
    too_few = len(devices) < partitions and not may_share_devices(settings.schedule.name)
    if too_few or len(devices) > partitions:
        raise ConfigError(
            f"devices={settings.devices}: {len(devices)} devices for {partitions} partitions; each partition needs "
            f"its own (only schedule={'|'.join((*names(several_per_device=True), *CUSTOM))} puts several on one)"
        )
    # A balance method measures with as many threads as the training will use.
    set_threads(settings.threads, all_devices)
    known = known_schedule(settings, order, partitions, len(devices), loader.micro_batches(settings.chunks))
    spec = make_pipeline_spec(settings, loader, partitions, devices, known)
    try:
        partitioning = _balance(settings, model, loader, devices, spec)
    except ConfigError:
        if settings.schedule.name != AUTO or isinstance(known, FixedOrder):
            raise
        # The schedule that stands for the order may keep more than the order has to.
        least = FixedOrder(AUTO, one_by_one(partitions, spec.micro_batches, len(devices)))
        spec = replace(spec, schedule=least)
        partitioning = _balance(settings, model, loader, devices, spec)
    if not has_custom_order(settings) or (order is not None and isinstance(known, FixedOrder)):
        return partitioning
    # Late: a run loads the planner only if it searches.
    from gpipe_cli.plan.for_training import choose_order

    chosen = choose_order(settings, model, loader, partitioning.balance, devices, spec)
    return replace(partitioning, spec=replace(spec, schedule=chosen))


def repeatable_order(settings: ModelConfig, order: FixedOrder | None) -> FixedOrder | None:
    """The order of the run to resume, unless schedule=auto has to search for another one."""
    if order is None or settings.schedule.name != AUTO or not has_custom_order(settings):
        return order
    partitions, replicas = _partitions_and_replicas(settings)
    devices = len(worker_devices(settings)) // replicas
    rows = -(-settings.batch_size // replicas)
    counts = [len(micro_batches(rows, settings.chunks, least)) for least in (1, LEAST_ROWS)]
    # Which of the two it is depends on the model, which is not built yet.
    chunks = order.chunks if order.chunks in counts else counts[0]
    return order if order_still_fits(order, partitions, devices, chunks) else None


def worker_devices(settings: ModelConfig) -> list[torch.device]:
    """The devices of the workers of all replicas."""
    if settings.engine and not traits_of_engine(settings).has_partitions:
        return resolve_devices(settings.devices, 1)
    partitions, replicas = _partitions_and_replicas(settings)
    return resolve_devices(settings.devices, partitions * replicas)


def _partitions_and_replicas(settings: ModelConfig) -> tuple[int, int]:
    layers = settings.balance.get("layers")
    replicas = settings.data_parallel
    default = len(layers) if layers else default_partitions(settings.devices, replicas)
    return settings.partitions or default, replicas


def _balance(
    settings: ModelConfig,
    model: nn.Sequential,
    loader: BatchLoader,
    devices: list[torch.device],
    spec: PipelineSpec,
) -> Partitioning:
    """Run the balance method, within the memory limit if there is one; compute only what the method takes."""
    takes = accepted_arguments(settings.balance, "balance", settings.allow)
    limited = settings.device_memory is not None
    offered: dict[str, Any] = {"module": model, "layer_count": len(model), "partitions": spec.partitions}
    memory = None
    # `gpipe balance` measures now; a run, or a profile of it, may reuse earlier measurements.
    reuse = bool(settings.engine)
    profiles = ProfileCache(default_folder(), reuse=reuse, warn=print_status)
    with ExitStack() as contexts:
        if limited or takes & {"sample", "memory"}:
            sample = make_sample(settings, loader)
            # A process that runs nothing leaves the device alone: torch would reserve memory on it.
            offered["sample"] = sample.to(devices[0]) if has_values(model) else sample
            contexts.enter_context(sample_must_fit(offered["sample"]))
            contexts.enter_context(autocast_of(settings, devices[0].type))
        if limited or "memory" in takes:
            memory = make_memory(settings, model, offered["sample"], spec)
        balanced: BalanceResult = instantiate(
            settings.balance,
            "balance",
            settings.allow,
            **offered,
            spec=spec,
            memory=memory,
            within=memory if limited else None,
            profiles=profiles,
            trained_micro_batches=_trained_micro_batches(settings, loader),
        )
    # balance=manual and a user's own method may ignore the limit.
    if memory is not None and not memory.fits(balanced.layers):
        raise memory.refusal(balanced.layers)
    return Partitioning(balanced, devices, spec, memory, profiles.origin)


def _trained_micro_batches(settings: ModelConfig, loader: BatchLoader) -> int | None:
    """How many micro-batches this process trains; None for a command that only measures."""
    if not settings.runs_steps:
        return None
    return settings.chunks * train_steps(settings, loader)


def train_steps(settings: ModelConfig, loader: BatchLoader) -> int:
    return settings.steps or settings.epochs * loader.steps_per_epoch


def make_engine(
    settings: RunConfig,
    parts: RunParts,
    *,
    measure_utilization: bool = False,
    observe: Callable[[Any, Tensor], None] | None = None,
) -> Engine:
    """Build the engine from what the settings say and from the parts of the run.

    observe: see `TrainingObjective`.
    """
    activity.now("building the engine")
    if settings.compile == "layers":
        _compile(settings, parts.model)
    objective = replace(_objective(settings, parts.model), observe=observe)
    spec = replace(engine_spec(settings, parts, objective), measure_utilization=measure_utilization)
    hint = traits_of_engine(settings).build_memory_hint
    with report_out_of_memory("building engine and optimizer", hint):
        engine: Engine = instantiate(settings.engine, "engine", settings.allow, spec=spec)
    return engine


def _compile(settings: RunConfig, model: nn.Sequential) -> None:
    """compile=layers: torch compiles each layer at its first call, for which it needs a compiler of C++."""
    name = f"compile={settings.compile}"
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        raise ConfigError(
            f"{name}: torch finds no compiler of C++; install g++, or name one in CXX, or remove compile"
        )
    if settings.log.layers:
        raise ConfigError(
            f"{name}: log.layers=true has hooks on the layers, which cannot be compiled; remove one"
        )
    if blocked_linear(model) is not None:
        raise ConfigError(f"{name}: the loss computes the scores of the last layer; give loss.block=none")
    compile_layers(model)


def engine_spec(settings: ModelConfig, parts: RunParts, objective: TrainingObjective) -> EngineSpec:
    """What the engine of a command is built from."""
    partitioning = parts.partitioning
    return EngineSpec(
        module=parts.model,
        objective=objective,
        balance=partitioning.balance,
        devices=partitioning.devices,
        chunks=settings.chunks,
        eval_chunks=settings.eval_chunks or settings.chunks,
        loss_by_micro_batch=blocked_linear(parts.model) is not None or isinstance(objective.loss, OwnLoss),
        least_rows=parts.loader.least_rows,
        schedule=partitioning.spec.schedule,
        checkpoint=checkpoint_mode(settings, len(partitioning.balance)),
        deferred_batch_norm=settings.deferred_batch_norm,
        step_timeout=settings.step_timeout,
        shards_optimizer=settings.shard == "optimizer",
        log_layers=settings.log.layers,
        scratch=planned_run_directory(settings.run_dir),
        make_sample=lambda: make_sample(settings, parts.loader),
        referenced=parts.referenced,
    )


def _objective(settings: RunConfig, model: nn.Sequential) -> TrainingObjective:
    loss = make_loss(settings)
    return TrainingObjective(
        loss,
        metrics_of(loss),
        optimizer=optimizer_factory(settings, model) if settings.trains else None,
        clip_grad_norm=settings.clip_grad_norm,
        precision=settings.precision,
    )
