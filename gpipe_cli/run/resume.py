"""gpipe train resume=...: which run goes on, from where, and with which settings.

The settings are the saved ones with what is given anew on top. What would make another model, or other samples
for the same step, is refused; everything else may change and is told. The files of a run are data: they pass the
same checks as a configuration from anywhere else, and `allow` is never taken from them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.load import settings_of
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.distributed.team import Team
from gpipe_cli.errors import ConfigError, DataError, RunError
from gpipe_cli.run.away import keeps_on_disk
from gpipe_cli.run.chosen import choose, tell_damaged
from gpipe_cli.run.job import Job
from gpipe_cli.run.saved_run import saved_config, with_overrides
from gpipe_cli.training.lock import only_writer
from gpipe_cli.training.loop import Plan
from gpipe_cli.training.run_directory import explicit_run_directory
from gpipe_cli.training.snapshot.contents import Snapshot, open_large_snapshot, open_snapshot
from gpipe_cli.training.snapshot.finding import is_snapshot, newest_valid, run_of
from gpipe_cli.training.snapshot.manifest import FILES, OPTIMIZER
from gpipe_cli.training.snapshot.record import Record, versions

FIXED = ("model", "data", "seed", "batch_size", "optimizer._target_")
"""Keys that cannot change: the tensors, or the samples of a step, would be others."""
MOVABLE = ("data.workers", "data.timeout", "data.root")
"""Below those, what only says where samples lie and who fetches them."""
OF_THE_LAUNCH = ("resume", "run_dir", "reset_optimizer")
"""Keys that are about one launch, not about the training."""


@final
@dataclass(frozen=True)
class Resumed:
    """A run that goes on."""

    run: Path
    snapshot: Snapshot | None
    """None: it was started and has saved nothing that can be used, so it begins anew in its place."""
    settings: TrainConfig
    tree: DictConfig
    changes: list[str]
    """What is given otherwise than before, as `key: before -> now`."""


def resumption(settings: TrainConfig, job: Job, held: ExitStack, *, writes: bool = True) -> Resumed | None:
    """The run that goes on, this process its only writer while `held`, if it writes; None where a new one begins."""
    run = _directory(settings, job)
    if run is None:
        return None
    if writes and not job.dry_run:
        held.enter_context(only_writer(run))
    saved = saved_config(run)
    tree = with_overrides(saved, job.tree, job.overrides, OF_THE_LAUNCH)
    now = settings_of(tree, job.command, job.overrides)
    assert isinstance(now, TrainConfig)
    changes = _changes(saved, tree)
    _refuse(changes)
    told = [f"{key}: {_told(before)} -> {_told(after)}" for key, (before, after) in changes.items()]
    return Resumed(run, _snapshot(settings, run, large=keeps_on_disk(now)), now, tree, told)


def agree_on_snapshot(again: Resumed | None, team: Team) -> None:
    """Every rank has read the snapshot itself: before anything moves, all have read the same."""
    saved = None if again is None else again.snapshot
    step = -1 if saved is None else saved.record.position.step
    least, most = team.smallest(step), team.largest(step)
    if least != most:
        found = "none" if least < 0 else f"that of step {least}"
        raise RunError(
            f"one rank finds the snapshot of step {most} to go on from, another {found}; "
            "the run directory must be the same for all machines"
        )


def resume_command(run: Path, settings: TrainConfig) -> str:
    """The settings are in the run; trust in a package is given anew each time."""
    return shlex.join(["gpipe", "train", f"resume={run}", *allow_words(settings)])


def allow_words(settings: TrainConfig) -> list[str]:
    return [f"allow=[{','.join(settings.allow)}]"] if settings.allow else []


def check_plan(plan: Plan, record: Record) -> None:
    """A run cannot end before where it stands, nor find other samples at its steps."""
    if (plan.seed, plan.steps_per_epoch) != (record.seed, record.steps_per_epoch):
        raise DataError(
            f"the run was trained with seed={record.seed} on {record.steps_per_epoch} mini-batches per epoch, "
            f"now it is seed={plan.seed} and {plan.steps_per_epoch}: its data or its config.yaml has changed"
        )
    if plan.steps < record.position.step:
        raise ConfigError(
            f"steps={plan.steps}: the run has come to step {record.position.step}; "
            "give at least that many, or resume from an earlier snapshot"
        )


def differences(record: Record) -> list[str]:
    """What else is not as it was: such a run goes on, but not to the bit."""
    before, now = (
        {**record.versions, "threads": record.threads},
        {**versions(), "threads": torch.get_num_threads()},
    )
    return [
        f"{name} was {before.get(name)} and is {value}: results may differ in the last bits"
        for name, value in now.items()
        if before.get(name) != value
    ]


def _directory(settings: TrainConfig, job: Job) -> Path | None:
    if settings.resume is None:
        return None
    if settings.resume != "auto":
        path = Path(settings.resume)
        if not path.is_dir():
            raise RunError(f"resume={settings.resume}: no such directory")
        return run_of(path) if is_snapshot(path) else path
    assert settings.run_dir is not None, "the configuration was checked"
    path = explicit_run_directory(settings.run_dir, job.number)
    return path if (path / "config.yaml").exists() else None


def _snapshot(settings: TrainConfig, run: Path, *, large: bool) -> Snapshot | None:
    """large: whether it may not fit into memory."""
    wanted = () if large else FILES
    opened = open_large_snapshot if large else open_snapshot
    if settings.resume != "auto":
        ignored = (OPTIMIZER,) if settings.reset_optimizer else ()
        snapshot = opened(choose("resume", str(settings.resume), wanted, ignored).snapshot)
        return replace(snapshot, state=replace(snapshot.state, resets_optimizer=settings.reset_optimizer))
    found = newest_valid(run, wanted)
    tell_damaged(found.damaged)
    return None if found.newest is None else opened(found.newest)


def _changes(saved: DictConfig, tree: DictConfig) -> dict[str, tuple[Any, Any]]:
    before, now = (dict(_leaves(OmegaConf.to_container(one))) for one in (saved, tree))
    return {
        key: (before.get(key), now.get(key))
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key) and key not in (*OF_THE_LAUNCH, "allow")
    }


def _refuse(changes: Mapping[str, tuple[Any, Any]]) -> None:
    for key, (before, after) in changes.items():
        if key not in MOVABLE and any(key == one or key.startswith(f"{one}.") for one in FIXED):
            raise ConfigError(
                f"{key}={_told(after)}: the run was started with {_told(before)}, which cannot change when it is "
                "resumed; leave it out, or start a new run"
            )


def _told(value: Any) -> str:
    return "null" if value is None else str(value)


def _leaves(node: Any, path: str = "") -> list[tuple[str, Any]]:
    """Dotted key and value of all that is no mapping."""
    if not isinstance(node, dict):
        return [(path, node)]
    return [
        leaf for key, value in node.items() for leaf in _leaves(value, f"{path}.{key}" if path else str(key))
    ]
