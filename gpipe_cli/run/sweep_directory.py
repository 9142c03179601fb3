"""The directory of a sweep: a numbered folder for each job, and sweep.json, by which the same line finds it again.

Two lines are the same if they compose the same jobs. A sweep without `run_dir` has a directory whose name ends in the
digest of its jobs, so that there is nothing to search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.config.compose import Composition
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.config.words import sets_key, without_keys
from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.report.page.run_files import RunFiles
from gpipe_cli.run.job import Summary
from gpipe_cli.training.run_directory import (
    check_directory_name,
    check_run_dir,
    explicit_run_directory,
    lock_run_directory,
    write_json,
)

MANIFEST = "sweep.json"
LOCK = "sweep.lock"
"""Not that of a run, or the directory would be taken for one."""
SWEEPS = Path("runs", "sweep")
DIRECTORY_KEYS = ("run_dir", "resume")
"""Keys that say where a sweep is, and are no part of what it computes."""
SHORT_DIGEST = 8


@final
@dataclass(frozen=True)
class SweepDirectory:
    path: Path
    resumes: bool
    """Whether an earlier launch of the same line made it."""

    def job(self, number: int) -> Path:
        return explicit_run_directory(str(self.path), number)

    def was_started(self, number: int) -> bool:
        return self.resumes and (self.job(number) / "config.yaml").exists()

    def summary(self, number: int) -> Summary | None:
        """The summary of a job that has finished: a run writes it at its end, and removes it to train longer."""
        return RunFiles(self.job(number)).json("summary.json") or None


def is_resumable(composition: Composition) -> bool:
    """Whether the jobs are new runs, which need directories, rather than runs of other directories trained longer."""
    resume = _settings(composition).resume
    return resume is None or resume == "auto"


@contextmanager
def open_sweep(composition: Composition, line: str) -> Iterator[SweepDirectory]:
    """Create the directory of a sweep, or find that of an earlier launch; inside, no other process writes to it."""
    settings = _settings(composition)
    digest = composition.digest(DIRECTORY_KEYS)
    if settings.run_dir is not None:
        _check_given(composition, settings.run_dir, resumes=settings.resume is not None)
    path = _earlier_or_new(digest) if settings.run_dir is None else Path(settings.run_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"run_dir={path}: the directory cannot be created: {error}") from error
    with lock_run_directory(path, LOCK):
        earlier = _read_manifest(path)
        if earlier is None:
            jobs = [without_keys(job, DIRECTORY_KEYS) for job in composition.jobs]
            write_json(path / MANIFEST, {"digest": digest, "command": line, "jobs": jobs})
        elif earlier.digest != digest:
            raise ConfigError(
                f"run_dir={path}: has a sweep with other settings, which repeats with: {earlier.line}; "
                "choose another directory"
            )
        yield SweepDirectory(path, resumes=earlier is not None or settings.resume == "auto")


@final
@dataclass(frozen=True)
class _Manifest:
    digest: str
    line: str


def _settings(composition: Composition) -> TrainConfig:
    settings = composition.job(composition.jobs[0]).settings
    assert isinstance(settings, TrainConfig), "only a sweep of training runs has a directory"
    return settings


def _earlier_or_new(digest: str) -> Path:
    short = digest[:SHORT_DIGEST]
    earlier = sorted(SWEEPS.glob(f"*-{short}"))
    return earlier[-1] if earlier else SWEEPS / f"{time.strftime('%Y%m%d-%H%M%S')}-{short}"


def _check_given(composition: Composition, run_dir: str, *, resumes: bool) -> None:
    check_directory_name(run_dir)
    path = Path(run_dir)
    given = {word for job in composition.jobs for word in job if sets_key([word], "run_dir")}
    if len(given) > 1:
        raise ConfigError(
            f"{', '.join(sorted(given))}: a sweep has one directory, with a numbered folder for each job"
        )
    if (path / "config.yaml").exists():
        raise ConfigError(f"run_dir={path}: is the directory of a single run; choose another one")
    # Without sweep.json nothing says whose jobs these are, and a sweep never continues the runs of another.
    if not resumes and not (path / MANIFEST).exists():
        for number in range(len(composition.jobs)):
            check_run_dir(run_dir, number)


def _read_manifest(path: Path) -> _Manifest | None:
    files = RunFiles(path)
    match files.json(MANIFEST):
        case {"digest": str(digest), "command": str(line)}:
            return _Manifest(digest, line)
    if files.problems or (path / MANIFEST).exists():
        raise RunError(f"{path / MANIFEST}: cannot be read; choose another directory, or remove this one")
    return None
