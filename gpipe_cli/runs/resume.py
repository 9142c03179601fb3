"""gpipe train resume=...: which run to resume, from which snapshot, and with which settings.

In order: find and lock the directory, read the saved settings and override them, refuse changes that cannot be
resumed, open the newest verified snapshot; then `commands/train` builds the model and the engine, loads the state
into the engine, and moves metrics and snapshots that are newer aside.

The settings are the saved ones, overridden by those on the command line. Changes that would make another model, or
other samples at the same step, are refused; gpipe reports all other changes. `allow` is never taken from the run.

A learning-rate schedule spans all steps of a run. With more steps it is stretched, so a rate that had decayed rises
again, which surprises a user who wanted the same run to continue: a line says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from gpipe_cli.build.components import reads_on_demand, starts_ranks
from gpipe_cli.build.custom_schedule import saved_order
from gpipe_cli.config.compose import overridden_epochs, settings_of
from gpipe_cli.config.instantiate import instantiate
from gpipe_cli.config.job import Job
from gpipe_cli.config.saved_paths import SavedPlace, saved_places, search_code
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.config.words import sets_key
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.state import EngineState, with_trained
from gpipe_cli.errors import ConfigError, DataError, PeerError, RunError
from gpipe_cli.launch.rank import is_main_process, is_rank
from gpipe_cli.runs.directory import lock_run_directory, recorded_outcome, resumed_directory
from gpipe_cli.runs.saved import (
    saved_config,
    select_snapshot,
    warn_of_damaged,
    with_overrides,
)
from gpipe_cli.runs.snapshots.contents import Snapshot, open_large_snapshot, open_snapshot
from gpipe_cli.runs.snapshots.manifest import (
    FILES,
    OPTIMIZER,
    first_valid_snapshot,
    is_snapshot,
    newest_valid_snapshot,
    search_together,
    snapshot_paths,
)
from gpipe_cli.runs.snapshots.record import TrainingRecord, check_base, versions
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.training.loop import TrainSpec
from gpipe_cli.values import flatten

FIXED_KEYS = ("model", "data", "seed", "batch_size", "optimizer._target_")
"""Keys that cannot change: the tensors, or the samples of a step, would be others."""
LOADING_KEYS = ("data.workers", "data.timeout", "data.root")
"""Exceptions to those: they decide only where samples are stored and which processes load them."""
BASE_KEY = "model.path"
"""May change if the snapshot says which files must be there."""
LAUNCH_KEYS = ("resume", "run_dir", "reset_optimizer")
"""Keys of one launch; the run does not keep them."""

_EQUAL = 1e-6
"""Rates that differ by a smaller fraction are called equal."""


@final
@dataclass(frozen=True)
class ResumedRun:
    directory: Path
    snapshot: Snapshot | None
    """None: the run saved no usable snapshot, so it starts again in the same directory."""
    settings: TrainConfig
    tree: DictConfig
    changes: list[str]
    """Settings that differ from the saved ones, as `key: before -> now`."""
    saved: DictConfig
    """The configuration of the run before this launch."""
    order: FixedOrder | None = None
    """That of schedule=auto or schedule=file."""

    @property
    def record(self) -> TrainingRecord | None:
        return None if self.snapshot is None else self.snapshot.record

    def state_for(self, model: nn.Module) -> EngineState:
        """The saved state; where `freeze` has changed, newly trained parameters start without optimizer state."""
        assert self.snapshot is not None, "there is nothing to resume from"
        if not any(change.startswith("freeze:") for change in self.changes):
            return self.snapshot.state
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        return with_trained(self.snapshot.state, trained)


def load_resumed_run(
    settings: TrainConfig, job: Job, cleanup: ExitStack, *, lock: bool = True
) -> ResumedRun | None:
    """Load the run that `resume=` names, or return None to start a new one.

    lock: hold the run directory's lock until `cleanup` is closed.
    """
    _check_restarts(settings, job)
    directory = resumed_directory(settings.resume, settings.run_dir)
    if directory is None:
        return None
    if not Path(str(settings.resume)).is_dir() and settings.resume != "auto":
        raise RunError(f"resume={settings.resume}: no such directory")
    # Before anything is read: a run that is still training would save, rename and remove snapshots meanwhile.
    if lock and not job.dry_run:
        cleanup.enter_context(lock_run_directory(directory))
        cleanup.enter_context(recorded_outcome(directory))
    saved = saved_config(directory)
    search_code(directory, settings, job.overrides)
    tree = with_overrides(saved, job.tree, job.overrides, LAUNCH_KEYS)
    new_settings = settings_of(tree, job.command, job.overrides)
    assert isinstance(new_settings, TrainConfig)
    if problem := overridden_epochs(new_settings, job.overrides):
        raise ConfigError(problem)
    # Of the processes of a job, rank 0 warns, once all ranks have looked.
    warn = not is_rank() and (job.dry_run or not starts_ranks(new_settings))
    snapshot = _load_snapshot(settings, directory, on_demand=reads_on_demand(new_settings), warn=warn)
    base = None if snapshot is None else snapshot.record.base
    changeable = LOADING_KEYS if base is None else (*LOADING_KEYS, BASE_KEY)
    changes = _changes(saved, tree, changeable, saved_places(directory))
    if snapshot is not None:
        check_base(base, new_settings.model, snapshot.path, contents=is_main_process())
    order = saved_order(directory, new_settings, job.overrides)
    return ResumedRun(directory, snapshot, new_settings, tree, changes, saved, order)


def _check_restarts(settings: TrainConfig, job: Job) -> None:
    """Under torchrun, which restarts ranks itself, check that a restarted rank finds the run and may go on."""
    wanted = settings.engine.get("max_restarts", 0)
    if not is_rank() or job.rank is not None or not wanted or not isinstance(wanted, int):
        return  # `check_components` refuses what is no number
    allowed, done = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    key = f"engine.max_restarts={wanted}"
    if settings.run_dir is None or settings.resume != "auto":
        raise ConfigError(
            f"{key}: with torchrun, give run_dir=... and resume=auto, so that restarted ranks resume"
        )
    if allowed < wanted:
        raise ConfigError(
            f"{key}: torchrun restarts ranks {allowed} times; start it with --max-restarts={wanted}"
        )
    if done > wanted:
        raise PeerError(f"{key}: torchrun has restarted the ranks {done} times")


def verified_in_ranks(resumed: ResumedRun | None, world: World) -> ResumedRun | None:
    """The run with a snapshot that the ranks have verified together; a process that is no rank did so alone.

    With resume=auto it has none if all snapshots are damaged.
    """
    if not is_rank():
        return resumed
    _check_same_snapshot(resumed, world)
    if resumed is None or resumed.snapshot is None:
        return resumed
    value, given = resumed.settings.resume, resumed.snapshot
    named = value not in (None, "auto") and is_snapshot(Path(str(value)))
    ignored = (OPTIMIZER,) if given.state.resets_optimizer else ()
    search = search_together([given.path] if named else snapshot_paths(resumed.directory), ignored, world)
    if search.newest is None and value != "auto":
        raise RunError("; ".join(map(str, search.damaged.values())))
    if world.is_rank_zero:
        warn_of_damaged(search.damaged)
    if search.newest is None:
        return replace(resumed, snapshot=None)
    snapshot = open_large_snapshot(search.newest)
    state = replace(snapshot.state, resets_optimizer=given.state.resets_optimizer)
    return replace(resumed, snapshot=replace(snapshot, state=state))


def _check_same_snapshot(resumed: ResumedRun | None, world: World) -> None:
    """Every rank finds the snapshot itself: check that all found the same one before any of them changes a file."""
    snapshot = None if resumed is None else resumed.snapshot
    step = -1 if snapshot is None else snapshot.record.position.step
    least, most = world.min(step), world.max(step)
    if least != most:
        other = "no snapshot" if least < 0 else f"that of step {least}"
        raise RunError(
            f"one rank would resume from the snapshot of step {most}, another from {other}; "
            "every machine must see the same run directory"
        )


def check_resumable(spec: TrainSpec, record: TrainingRecord | None) -> None:
    """Refuse to end a run before the step it has reached, or to give its steps other samples."""
    if record is None:
        return  # it starts at step 0
    if (spec.seed, spec.steps_per_epoch) != (record.seed, record.steps_per_epoch):
        raise DataError(
            f"the run was trained with seed={record.seed} on {record.steps_per_epoch} mini-batches per epoch; "
            f"now seed={spec.seed} and there are {spec.steps_per_epoch}: its data or its config.yaml has changed"
        )
    if spec.steps < record.position.step:
        raise ConfigError(
            f"steps={spec.steps}: the run has reached step {record.position.step}; "
            "give at least that many, or resume from an earlier snapshot"
        )


def version_changes(record: TrainingRecord) -> list[str]:
    """Report versions and thread counts that differ: a resumed run may then round differently."""
    before = {**record.versions, "threads": record.threads}
    now = {**versions(), "threads": torch.get_num_threads()}
    return [
        f"{name} was {before.get(name)} and is now {value}: results may differ in the last bits"
        for name, value in now.items()
        if before.get(name) != value
    ]


def _load_snapshot(settings: TrainConfig, run: Path, *, on_demand: bool, warn: bool) -> Snapshot | None:
    """Open the snapshot to resume from; a rank opens only its record, until all ranks have verified it together.

    on_demand: leave the tensors on disk, where the engine reads those that it needs.
    warn: of damaged snapshots that are newer.
    """
    verify, wanted = not is_rank(), () if on_demand else FILES
    open_verified = open_large_snapshot if on_demand and verify else open_snapshot
    # A snapshot that the user names must be valid; `auto` takes the newest that is, and warns of newer ones that are
    # not.
    if settings.resume != "auto":
        ignored = (OPTIMIZER,) if settings.reset_optimizer else ()
        search = partial(first_valid_snapshot, wanted=wanted, ignored=ignored, verify=verify)
        named = select_snapshot("resume", str(settings.resume), search, warn=warn)
        snapshot = open_verified(named)
        return replace(snapshot, state=replace(snapshot.state, resets_optimizer=settings.reset_optimizer))
    snapshots = newest_valid_snapshot(run, wanted, verify=verify)
    if warn:
        warn_of_damaged(snapshots.damaged)
    return None if snapshots.newest is None else open_verified(snapshots.newest)


def _changes(
    saved: DictConfig, tree: DictConfig, changeable: Sequence[str], places: Mapping[str, SavedPlace]
) -> list[str]:
    """Settings that differ from the saved ones; those that must not are an error.

    Exceptions are those in `changeable`, and paths to what has moved away; places: those of the run.
    """
    before, now = (dict(flatten(OmegaConf.to_container(config))) for config in (saved, tree))
    changes = []
    for key in dict.fromkeys([*before, *now]):
        old, new = (_yaml_text(config.get(key)) for config in (before, now))
        # A key that is newer than the run means what its empty default does.
        unknown = key not in before and not now[key]
        if before.get(key) == now.get(key) or unknown or key in (*LAUNCH_KEYS, "allow"):
            continue
        own = [place for name, place in places.items() if name.partition("[")[0] == key]
        if own and _real_paths(before.get(key)) == _real_paths(now.get(key)):
            continue
        may_change = key in changeable or any(place.is_gone for place in own)
        if not may_change and any(f"{key}.".startswith(f"{fixed}.") for fixed in FIXED_KEYS):
            raise ConfigError(
                f"{key}={new}: the run was started with {old}, which cannot change when you resume it; "
                "remove it, or start a new run"
            )
        changes.append(f"{key}: {old} -> {new}")
    return changes


def _real_paths(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_real_paths, value))
    return os.path.realpath(value) if isinstance(value, str) else value


def _yaml_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def lr_line(
    saved: DictConfig, settings: TrainConfig, now: TrainSpec, step: int, overrides: Sequence[str]
) -> str | None:
    """How the learning rate of a run resumed at `step` differs from what its saved settings planned; None if equal."""
    before = _saved_spec(saved, settings, now)
    if before is None or not 0 < step < now.steps:
        return None
    old, new = before.lr_at(min(step, before.steps - 1)), now.lr_at(step)
    if math.isclose(old, new, rel_tol=_EQUAL):
        return None
    given = sets_key(overrides, "lr_schedule") or before.lr != now.lr
    why = f"{_name(settings)} now spans {now.steps} steps instead of {before.steps}, so "
    course = (
        f"it goes from {before.lr_at(step - 1):.3g} to {new:.3g} and ends at {now.lr_at(now.steps - 1):.3g}"
    )
    return f"learning rate: {'' if given else why}{course}{'' if given else _offer(old)}"


def longer_line(settings: TrainConfig, spec_steps: int, longer_steps: int) -> str | None:
    """What the rate does if a run that has made `spec_steps` is resumed with more; None if it stays."""
    schedule = instantiate(settings.lr_schedule, "lr_schedule", settings.allow)
    lr = settings.optimizer["lr"]
    old, new = (
        lr * schedule.factor(spec_steps - 1, spec_steps),
        lr * schedule.factor(spec_steps, longer_steps),
    )
    if math.isclose(old, new, rel_tol=_EQUAL):
        return None
    return f"then goes from {old:.3g} to {new:.3g}, because {_name(settings)} spans all steps{_offer(old)}"


def _offer(lr: float) -> str:
    return f"; to keep the last rate instead, add lr_schedule=constant optimizer.lr={lr:.3g}"


def _name(settings: TrainConfig) -> str:
    """`OneCycle` as it is written on the command line: one_cycle."""
    name = str(settings.lr_schedule["_target_"]).rpartition(".")[2]
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def _saved_spec(saved: DictConfig, settings: TrainConfig, now: TrainSpec) -> TrainSpec | None:
    """The plan of the run before this launch; None if its settings cannot be read any more."""
    try:
        tree: Any = OmegaConf.to_container(saved, resolve=True)
        match tree:
            case {
                "epochs": int(epochs),
                "optimizer": {"lr": float(lr) | int(lr)},
                "lr_schedule": Mapping() as node,
            }:
                schedule = instantiate(node, "lr_schedule", settings.allow)
                steps = tree.get("steps") or epochs * now.steps_per_epoch
                return replace(now, steps=int(steps), lr=lr, lr_schedule=schedule)
    except (ConfigError, ValueError, TypeError):  # a line for the user is not worth an error
        return None
    return None
