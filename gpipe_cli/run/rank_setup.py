"""This process as one of several that run a command: whether it is, with whom, and where its part of the model lies.

Ranks are started by `gpipe` itself (`launching`), or by torchrun, also on several machines. Either way each of them
runs the whole command; rank 0 speaks and writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from gpipe_cli.config.schema import EvalConfig, RunConfig
from gpipe_cli.distributed.groups import setup_process_groups
from gpipe_cli.distributed.place import check_placement
from gpipe_cli.distributed.team import Team
from gpipe_cli.engines.devices import available
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import ConfigError, PeerError, Stopped
from gpipe_cli.launch.heartbeat import HeartbeatEngine, Heartbeats
from gpipe_cli.report.failure import describe
from gpipe_cli.run.build import RunParts, build_parts
from gpipe_cli.run.components import engine_name, manual_balance, measures_layers, runs_in_ranks
from gpipe_cli.run.job import Job
from gpipe_cli.schedule import traits
from gpipe_cli.schedule.action import partitions_of

OF_A_LOST_PEER = ("gloo", "Connection closed by peer", "Connection reset by peer", "Socket Timeout")
"""What torch says of a peer that has gone; it has no type of its own for most of it."""
LONGER_THAN_THE_WATCH = 60.0
"""Seconds; where a launcher watches the ranks, it is the one to say that a step takes too long."""
AS_GOOD_AS_EVER = timedelta(days=7)
Settings = TypeVar("Settings", bound=RunConfig)


def is_rank() -> bool:
    return distributed.is_torchelastic_launched()


def leads() -> bool:
    """Whether this process is the one that speaks and writes; one that is no rank does."""
    return not is_rank() or os.environ["RANK"] == "0"


def starts_ranks(settings: RunConfig) -> bool:
    """Whether the job is to be run by processes that are not there yet."""
    return runs_in_ranks(settings) and not is_rank()


def as_rank(settings: Settings, job: Job) -> Settings:
    """The settings as this rank needs them: a balance that was found before, devices of its own machine."""
    if not is_rank():
        return settings
    if not runs_in_ranks(settings):
        raise ConfigError(
            f"{engine_name(settings)}: runs in one process, and torchrun started {os.environ['WORLD_SIZE']}; "
            "add engine=processes, or start it without torchrun"
        )
    if job.rank is not None:
        return with_balance(settings, job.rank.balance)
    if settings.devices == "auto":
        if settings.partitions is not None and not traits(settings.schedule.name).several_per_device:
            _check_size(settings, settings.partitions, settings.partitions, int(os.environ["WORLD_SIZE"]))
        own = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
        return replace(settings, devices=[own] * int(os.environ["WORLD_SIZE"]))
    return settings


def with_balance(settings: Settings, layers: list[int]) -> Settings:
    """The settings with a balance that was found elsewhere."""
    return replace(settings, balance=manual_balance(layers), partitions=None)


@contextmanager
def joined(settings: RunConfig, job: Job) -> Iterator[Team]:
    """Inside, the ranks of the job are connected, with the groups `data` and `pipe`; a job of one process has none."""
    if not is_rank():
        yield Team()
        return
    with _peers_missed(), _connected(settings, job) as team:
        try:
            yield team
        except Stopped:
            team.largest(0)
            raise
        team.largest(0)  # they leave together: torch ends all others as soon as it misses one


@contextmanager
def _connected(settings: RunConfig, job: Job) -> Iterator[Team]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size % settings.data_parallel:
        raise ConfigError(
            f"data_parallel={settings.data_parallel}: there are {size} processes; every replica needs as many of them"
        )
    on_cuda = any(device.type == "cuda" for device in available(settings.devices))
    timeout = _timeout(settings, job)
    if job.rank is not None:  # all on this machine, where nobody else is to be listened to
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        init_method="env://" if job.rank is None else job.rank.meeting.init_method,
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    try:
        setup_process_groups(
            [("data", settings.data_parallel), ("pipe", size // settings.data_parallel)], timeout=timeout
        )
        yield Team.present()
    finally:
        distributed.destroy_process_group()


@contextmanager
def _peers_missed() -> Iterator[None]:
    """Inside, what torch raises when a peer has gone becomes an error of ours."""
    try:
        yield
    except Exception as error:
        if not _lost_a_peer(error):
            raise
        raise PeerError(f"another rank is gone: {describe(error)}") from error


def _lost_a_peer(error: Exception) -> bool:
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in OF_A_LOST_PEER)


def assemble_together(settings: RunConfig, job: Job, team: Team) -> RunParts:
    """Data, model and partitions; where the balance is measured, rank 0 does so for all."""
    if not team.leads and measures_layers(settings):
        settings = with_balance(settings, json.loads(team.of_leader("")))
    only_looks = job.dry_run or starts_ranks(settings)
    needed = isinstance(settings, EvalConfig) or measures_layers(settings)
    parts = build_parts(settings, job.overrides, storage=needed or not only_looks)
    if team.leads and measures_layers(settings):
        team.of_leader(json.dumps(parts.partitioning.balance))
    split = parts.partitioning
    if runs_in_ranks(settings):
        check_placement(settings.schedule.name, len(split.balance), len(split.devices))
    if is_rank():
        _check_size(settings, len(split.balance), len(split.devices), team.size)
    return parts


def watched(engine: Engine, job: Job, team: Team) -> Engine:
    """The engine, with a sign of life after every step where somebody looks for it."""
    if job.rank is None:
        return engine
    return HeartbeatEngine(engine, Heartbeats(job.rank.meeting.heartbeats, team.size), team.rank)


def places(partitions: int, devices: Sequence[torch.device], replicas: int) -> list[str]:
    """What each rank has of the model, in words."""
    found = []
    for replica in range(replicas):
        of_replica = f" of replica {replica}" if replicas > 1 else ""
        for worker in range(len(devices)):
            own = list(partitions_of(worker, partitions, len(devices)))
            word = "partition" if len(own) == 1 else "partitions"
            found.append(f"{word} {', '.join(map(str, own))}{of_replica}")
    return found


def _check_size(settings: RunConfig, partitions: int, width: int, size: int) -> None:
    """As many ranks as the partitions need: torchrun starts what it is told to."""
    wanted = width * settings.data_parallel
    if size != wanted:
        raise ConfigError(
            f"partitions={partitions} data_parallel={settings.data_parallel}: need {wanted} processes, torchrun "
            f"started {size}"
        )


def _timeout(settings: RunConfig, job: Job) -> timedelta | None:
    if job.rank is None:  # torch's own, unless something else was asked for
        return None if settings.step_timeout is None else timedelta(seconds=settings.step_timeout)
    if settings.step_timeout is None:
        return AS_GOOD_AS_EVER
    return timedelta(seconds=settings.step_timeout + LONGER_THAN_THE_WATCH)
