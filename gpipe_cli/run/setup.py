"""Where a run comes from and where it lives: its directory with what is needed to repeat it, new or gone on with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

from omegaconf import OmegaConf

from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.distributed.team import Team
from gpipe_cli.report.environment import environment
from gpipe_cli.run.job import Job
from gpipe_cli.run.resume import Resumed, differences
from gpipe_cli.safe_files import writing
from gpipe_cli.training.lock import only_writer
from gpipe_cli.training.loop import Position
from gpipe_cli.training.rewind import cut_metrics, rewind_snapshots, seen_bytes
from gpipe_cli.training.run_directory import make_run_directory, write_json, write_text
from gpipe_cli.training.snapshot.record import Record


@final
@dataclass(frozen=True)
class Begun:
    """A run about to train."""

    directory: Path
    record: Record | None = None
    """Where it goes on from; None: from the start."""
    news: Sequence[str] = ()
    """What there is to say about that."""

    @property
    def position(self) -> Position:
        return Position() if self.record is None else self.record.position


def begin_together(
    settings: TrainConfig, job: Job, again: Resumed | None, held: ExitStack, team: Team
) -> Begun:
    """The run of a team: rank 0 makes its directory, and all know which it is."""
    record = None if again is None or again.snapshot is None else again.snapshot.record
    begun = begin_run(settings, job, again, held) if team.leads else None
    directory = Path(team.of_leader(str(begun.directory) if begun is not None else ""))
    if begun is None:
        return Begun(directory, record)
    if job.rank is not None:
        job.rank.meeting.tell_run(directory)
    return begun


def begin_run(settings: TrainConfig, job: Job, again: Resumed | None, held: ExitStack) -> Begun:
    """The run and its directory, this process its only writer for as long as `held` is."""
    if again is not None:
        return _go_on(again)
    directory = make_run_directory(settings.run_dir, job.command, job.model, job.number)
    held.enter_context(only_writer(directory))
    write_origin(directory, job)
    return Begun(directory)


def write_origin(directory: Path, job: Job) -> None:
    """What was asked for, and on what machine."""
    write_text(directory / "config.yaml", OmegaConf.to_yaml(job.tree))
    write_text(directory / "overrides.yaml", OmegaConf.to_yaml(list(job.overrides)))
    write_json(directory / "env.json", environment())


def _without_optimizer(again: Resumed) -> str:
    return ", with a new optimizer state" if again.settings.reset_optimizer else ""


def _go_on(again: Resumed) -> Begun:
    """Take the directory to where the snapshot stands; the settings from now on become those of the run."""
    record = None if again.snapshot is None else again.snapshot.record
    position = Position() if record is None else record.position
    used = None if again.snapshot is None else again.snapshot.path
    metrics = again.run / "metrics.jsonl"
    with writing(metrics):  # judged before anything is changed, cut after the snapshots that know its rows
        kept = seen_bytes(metrics, position)
    with writing(again.run):
        aside = rewind_snapshots(again.run, position.step, used)
        cut_metrics(metrics, kept)
        (again.run / "summary.json").unlink(missing_ok=True)
        if again.changes:
            write_text(again.run / "config.yaml", OmegaConf.to_yaml(again.tree))
    news = [
        "the run had saved nothing that can be used; it begins anew"
        if used is None
        else f"going on from {used}{_without_optimizer(again)}",
        *(f"set aside, as it is damaged or of a future that is given up: {name}" for name in aside),
        *(differences(record) if record is not None else ()),
        *(f"changed: {change}" for change in again.changes),
    ]
    return Begun(again.run, record, news)
