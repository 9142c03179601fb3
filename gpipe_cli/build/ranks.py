"""A configured run in several processes: what its launcher and its ranks need of the settings and the job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from omegaconf import OmegaConf
from torch import nn

from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.accelerator.devices import accelerators, available_devices, is_accelerator, resolve_devices
from gpipe_cli.build.components import (
    engine_name,
    manual_balance,
    measures_layers,
    needs_values,
    starts_ranks,
    traits_of_engine,
)
from gpipe_cli.build.custom_schedule import has_custom_order, order_from_text, order_text
from gpipe_cli.build.model import FEWER_PARAMETERS
from gpipe_cli.build.parts import BuiltModel, Partitioning, RunParts, build_parts, repeatable_order
from gpipe_cli.config.job import SAME_IN_RANKS, Job, Summary, resume_command
from gpipe_cli.config.schema import RunConfig
from gpipe_cli.data.datasets import Data
from gpipe_cli.distributed.groups import RankCoords, backends_for
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import ConfigError
from gpipe_cli.launch.rank import is_rank
from gpipe_cli.launch.rank_files import HeartbeatEngine, Heartbeats, RankTask
from gpipe_cli.launch.rank_setup import connect_ranks, connected_files, describe_ranks
from gpipe_cli.report.output import print_status
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.orders import may_share_devices
from gpipe_cli.sequential.deferred import fill_others
from gpipe_cli.torch_internals.deferred_values import DeferredValues

Settings = TypeVar("Settings", bound=RunConfig)


def run_in_ranks(settings: RunConfig, job: Job, parts: RunParts) -> Summary:
    """Start ranks that run the job, and wait for them; the summary of rank 0."""
    # Late: most runs have no ranks, and no rank starts others.
    from gpipe_cli.launch.launcher import launch_ranks

    partitioning = parts.partitioning
    if partitioning.origin:
        print_status(f"balance {partitioning.balance}: {partitioning.origin}")
    known = {name: getattr(job, name) for name in SAME_IN_RANKS}
    config, order = OmegaConf.to_yaml(job.tree), order_text(partitioning.spec)
    task = RankTask(job.command, partitioning.balance, config, known, order)
    return launch_ranks(
        task,
        describe_ranks(partitioning.workers, settings.data_parallel),
        step_timeout=settings.step_timeout,
        max_restarts=int(settings.engine.get("max_restarts", 0)),
        resume_command=partial(resume_command, settings=settings) if settings.trains else None,
    )


def settings_for_rank(settings: Settings, job: Job) -> Settings:
    """The settings of this rank: the balance its launcher found, and devices of its own machine."""
    if not is_rank():
        return settings
    if not traits_of_engine(settings).needs_processes:
        raise ConfigError(
            f"{engine_name(settings)}: runs in one process, but torchrun started {os.environ['WORLD_SIZE']}; "
            "add engine=processes, or start it without torchrun"
        )
    if job.rank is not None:
        return _with_balance(settings, job.rank.balance)
    if settings.devices == "auto":
        if settings.partitions is not None and not may_share_devices(settings.schedule.name):
            _check_size(settings, settings.partitions, settings.partitions, int(os.environ["WORLD_SIZE"]))
        return replace(settings, devices=[str(_device_of_local_rank())] * int(os.environ["WORLD_SIZE"]))
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    of_machine = available_devices(settings.devices)[first : first + int(os.environ["LOCAL_WORLD_SIZE"])]
    _check_devices(settings, of_machine)
    return settings


def _device_of_local_rank() -> torch.device:
    """The accelerator with the number of this rank on its machine, or the CPU where there is no accelerator."""
    present, rank = accelerators(), int(os.environ["LOCAL_RANK"])
    if present and rank >= len(present):
        raise ConfigError(
            f"devices=auto: torchrun started {os.environ['LOCAL_WORLD_SIZE']} processes on a machine with "
            f"{len(present)} accelerators; give --nproc-per-node={len(present)}, or devices=[cpu,...]"
        )
    return present[rank] if present else torch.device("cpu")


def _check_devices(settings: RunConfig, of_machine: Sequence[torch.device]) -> None:
    """Raise ConfigError if the ranks of one machine cannot have these devices."""
    if len({device.type for device in of_machine}) > 1:
        raise ConfigError(
            f"devices={settings.devices}: ranks need devices of one type to send tensors to each other; "
            "use engine=threads to mix types"
        )
    for device in of_machine:
        if is_accelerator(device) and of_machine.count(device) > 1:
            raise ConfigError(
                f"devices={settings.devices}: gives {device} to {of_machine.count(device)} ranks, and each needs a "
                "device of its own; use engine=threads to share one"
            )
        backends_for(device)  # refuses a type that ranks cannot send from


def _own_device(settings: RunConfig) -> torch.device:
    """The device of this rank."""
    size = int(os.environ["WORLD_SIZE"])
    devices = resolve_devices(settings.devices, size)
    if len(devices) < size:
        raise ConfigError(
            f"devices={settings.devices}: {len(devices)} devices for {size} processes; give one for each"
        )
    return devices[int(os.environ["RANK"])]


def _with_balance(settings: Settings, layers: list[int]) -> Settings:
    return replace(settings, balance=manual_balance(layers), partitions=None)


def connect(settings: RunConfig, job: Job) -> AbstractContextManager[World]:
    """Connect this rank to the others while the block runs."""
    return connect_ranks(
        None if job.rank is None else job.rank.files,
        data_parallel=settings.data_parallel,
        step_timeout=settings.step_timeout,
        device=_own_device(settings) if is_rank() else torch.device("cpu"),
    )


def build_parts_in_ranks(
    settings: RunConfig,
    job: Job,
    world: World,
    *,
    initial_weights: bool,
    data: Data | None = None,
    order: FixedOrder | None = None,
    built: BuiltModel | None = None,
) -> RunParts:
    """Build data, model and partitions in every rank; only rank 0 measures a balance or an order, and shares it.

    initial_weights: as for `make_model`.
    data: used instead of the configured one.
    order: that of the run to resume, or of its plan.
    built: as for `build_parts`.
    """
    if job.rank is not None and job.rank.order:
        order = order_from_text(job.rank.order)
    else:
        order = repeatable_order(settings, order)
    shares = measures_layers(settings) or (order is None and has_custom_order(settings))
    if not world.is_rank_zero and shares:
        shared = world.from_rank_zero(None)
        settings = _with_balance(settings, shared["balance"])
        order = order_from_text(shared["order"]) if shared["order"] else None
    without_running = job.dry_run or starts_ranks(settings)
    # A dry run shows what the run will do, so it measures what the run measures.
    has_partitions = traits_of_engine(settings).has_partitions
    measures = job.dry_run and has_partitions and measures_layers(settings) and not starts_ranks(settings)
    # A launcher only compares names and shapes with those of the trained weights.
    loads_weights = settings.uses_trained_weights and not starts_ranks(settings)
    runs_model = needs_values(settings) or (order is None and has_custom_order(settings))
    needs_storage = loads_weights or (runs_model and not job.dry_run) or needs_values(settings)
    parts = build_parts(
        settings,
        job.overrides,
        storage=needs_storage or not without_running,
        if_it_fits=measures and not needs_storage,
        initial_weights=initial_weights,
        deferred=is_rank() and not runs_model,
        print_notes=world.is_rank_zero and job.rank is None,  # a launcher has printed them for its ranks
        data=data,
        order=order,
        built=built,
    )
    partitioning = parts.partitioning
    if world.is_rank_zero and shares:
        shared = {"balance": partitioning.balance, "order": order_text(partitioning.spec)}
        world.from_rank_zero(shared)
    _check_ranks(settings, partitioning, world)
    if (
        parts.values is not None and is_rank()
    ):  # an engine that keeps the model on disk reads the values itself
        _fill_own_layers(parts.model, partitioning, parts.values)
    return replace(parts, values=None)


def _check_ranks(settings: RunConfig, partitioning: Partitioning, world: World) -> None:
    """Refuse partitions that no schedule of torch runs in processes, and devices or ranks that do not fit them."""
    if traits_of_engine(settings).needs_processes:
        # Late: torch.distributed.pipelining loads torch's compiler, which takes a while.
        from gpipe_cli.distributed.torch_schedule import check_placement

        check_placement(partitioning.spec.schedule, len(partitioning.balance), len(partitioning.devices))
    if starts_ranks(settings):
        ranks = len(partitioning.devices) * settings.data_parallel
        _check_devices(settings, resolve_devices(settings.devices, ranks))
    if is_rank():
        _check_size(settings, len(partitioning.balance), len(partitioning.devices), world.size)


@report_out_of_memory("building the layers of this rank", FEWER_PARAMETERS)
def _fill_own_layers(model: nn.Sequential, partitioning: Partitioning, values: DeferredValues) -> None:
    """Give the layers of this rank their values; those of other ranks never get memory."""
    own = RankCoords.of_groups(partitioning.workers, partitioning.devices).own_partitions
    layers, ends = list(model), list(accumulate(partitioning.balance))
    kept = [
        layer for index in own for layer in layers[ends[index] - partitioning.balance[index] : ends[index]]
    ]
    fill_others(kept, values)


def with_heartbeat(engine: Engine, settings: RunConfig, parts: RunParts, world: World) -> Engine:
    """The engine, which sends heartbeats to whatever supervises this rank; a process that is no rank has none."""
    files = connected_files()
    if files is None:
        return engine
    partitioning = parts.partitioning
    files.write_descriptions(describe_ranks(partitioning.workers, settings.data_parallel))
    return HeartbeatEngine(engine, Heartbeats(files.heartbeats, world.size), world.rank)


def _check_size(settings: RunConfig, partitions: int, width: int, size: int) -> None:
    """torchrun may have started another number of ranks than the partitions need."""
    wanted = width * settings.data_parallel
    if size != wanted:
        raise ConfigError(
            f"partitions={partitions} data_parallel={settings.data_parallel}: need {wanted} processes, torchrun "
            f"started {size}"
        )
