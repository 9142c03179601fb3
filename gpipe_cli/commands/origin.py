"""Where a run comes from and where it lives: its directory with what is needed to repeat it, new or gone on with."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from omegaconf import OmegaConf

from gpipe_cli.commands.jobs import Job
from gpipe_cli.commands.resume import Resumed
from gpipe_cli.config.schema import Train
from gpipe_cli.errors import ResourceError
from gpipe_cli.report.environment import environment
from gpipe_cli.training.lock import only_writer
from gpipe_cli.training.loop import Position
from gpipe_cli.training.rewind import rewind_metrics, rewind_snapshots
from gpipe_cli.training.run_directory import make_run_directory, write_json, write_text


def begin_run(settings: Train, job: Job, again: Resumed | None, held: ExitStack) -> Path:
    """The run directory, this process its only writer for as long as `held` is."""
    if again is not None:
        _go_back(again)
        return again.run
    directory = make_run_directory(settings.run_dir, job.command, job.model, job.number)
    held.enter_context(only_writer(directory))
    write_text(directory / "config.yaml", OmegaConf.to_yaml(job.tree))
    write_text(directory / "overrides.yaml", OmegaConf.to_yaml(list(job.overrides)))
    write_json(directory / "env.json", environment())
    return directory


def _go_back(again: Resumed) -> None:
    """Take the directory to where the snapshot stands; the settings from now on become those of the run."""
    position = Position() if again.snapshot is None else again.snapshot.record.position
    used = None if again.snapshot is None else again.snapshot.path
    try:
        rewind_snapshots(again.run, position.step, used)
        rewind_metrics(again.run / "metrics.jsonl", position)
        (again.run / "summary.json").unlink(missing_ok=True)
        if again.changes:
            write_text(again.run / "config.yaml", OmegaConf.to_yaml(again.tree))
    except OSError as error:
        raise ResourceError(f"{again.run}: the run cannot go on: {error}") from error
