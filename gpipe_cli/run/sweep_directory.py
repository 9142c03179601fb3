"""The directory of a sweep: a folder for each job, and sweep.json, by which the same line finds it again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.process_lifetime import temporary_folder
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.run_files import RunFiles
from gpipe_cli.training.run_directory import (
    check_run_dir,
    lock_run_directory,
    make_run_directory,
    write_json,
)

MANIFEST, LOCK, RESULTS = "sweep.json", "sweep.lock", "results"
"""The lock is not that of a run, or the directory would be taken for one."""
SWEEPS = Path("runs", "sweep")


@contextmanager
def open_sweep(given: str | None, digest: str, line: str, model: str) -> Iterator[Path]:
    """Create the directory of a sweep, or find that of an earlier launch; inside, no other process writes to it.

    digest: of what the sweep computes. line: the command that repeats it. model: the name of that of its first job.
    """
    path = Path(given) if given is not None else _earlier(digest)
    if path is None:
        path = make_run_directory(None, SWEEPS.name, model)
    elif not (path / MANIFEST).exists():
        check_run_dir(str(path))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"{path}: the directory cannot be created: {error}") from error
    with lock_run_directory(path, LOCK):
        earlier = _manifest(path)
        if earlier is None:
            write_json(path / MANIFEST, {"digest": digest, "command": line})
        elif earlier[0] != digest:
            raise ConfigError(
                f"{path}: has a sweep with other settings, which repeats with: {earlier[1]}; "
                "choose another directory"
            )
        print_status(f"{'sweep directory:' if earlier is None else 'resuming the sweep in'} {path}")
        yield path


@contextmanager
def results_folder(sweep: Path | None) -> Iterator[Path]:
    """An empty folder for results: those of an earlier launch would count as results of this one."""
    if sweep is None:
        with temporary_folder("sweep") as folder:
            yield folder
        return
    folder = sweep.absolute() / RESULTS
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield folder


def _earlier(digest: str) -> Path | None:
    """The newest directory with this sweep."""
    manifests = sorted(SWEEPS.glob(f"*/*/{MANIFEST}"), key=lambda path: path.parent.name, reverse=True)
    same = (path.parent for path in manifests if RunFiles(path.parent).json(MANIFEST).get("digest") == digest)
    return next(same, None)


def _manifest(path: Path) -> tuple[str, str] | None:
    """The digest and the line of the sweep that made the directory."""
    files = RunFiles(path)
    match files.json(MANIFEST):
        case {"digest": str(digest), "command": str(line)}:
            return digest, line
    if files.problems or (path / MANIFEST).exists():
        raise RunError(f"{path / MANIFEST}: cannot be read; choose another directory, or remove this one")
    return None
