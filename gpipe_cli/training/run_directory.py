"""The directory of a run: made once, never shared, never overwritten."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigError, ResourceError
from gpipe_cli.safe_files import writing
from gpipe_cli.training.snapshot.durable import write_file

LONGEST_NAME = 80


def check_run_dir(run_dir: str | None, number: int | None) -> None:
    """Complain of a directory that cannot be used before anything expensive is done."""
    if run_dir is not None and (not run_dir or "\0" in run_dir):
        raise ConfigError(
            f"run_dir={run_dir}: give the name of a directory, or null for runs/<command>/<model>/<time>"
        )
    path = planned_run_directory(run_dir, number)
    try:
        if run_dir is not None and path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"run_dir={path}: exists and is not empty; choose another one, or remove it")
        nearest = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    except OSError as error:  # a name too long, a folder that may not be read
        raise ConfigError(f"run_dir={path}: cannot be used: {error}") from error
    if not nearest.is_dir():
        raise ConfigError(f"run_dir={path}: {nearest} is a file; choose another directory")
    if not os.access(nearest, os.W_OK):
        raise ResourceError(f"run_dir={path}: {nearest} cannot be written to")


def make_run_directory(run_dir: str | None, command: str, name: str, number: int | None) -> Path:
    """The given directory (a numbered folder of it for a job of a sweep), else a new one named by the time."""
    check_run_dir(run_dir, number)
    try:
        if run_dir is None:
            return _new(Path("runs") / command / _safe(name))
        path = explicit_run_directory(run_dir, number)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"the run directory cannot be made: {error}") from error
    return path


def planned_run_directory(run_dir: str | None, number: int | None) -> Path:
    """Where a run will be, or in which directory: the rest of its name is known when it is made."""
    return Path("runs") if run_dir is None else explicit_run_directory(run_dir, number)


def explicit_run_directory(run_dir: str, number: int | None) -> Path:
    """The directory that was asked for, a job of a sweep in a numbered folder of it."""
    if number is None:
        return Path(run_dir)
    path = Path(run_dir) / str(number)
    if path.is_symlink():  # the user named the folder of the sweep, not where one of its jobs leads
        raise ConfigError(
            f"run_dir={run_dir}: {path} is a symbolic link; remove it, or choose another directory"
        )
    return path


def _new(base: Path) -> Path:
    """A directory nobody else has: `mkdir` decides between runs that start in the same second."""
    base.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in itertools.count(1):
        path = base / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable: the loop above has no end")


def _safe(name: str) -> str:
    """A name as one component of a path."""
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip(".")[:LONGEST_NAME] or "model"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, f"{json.dumps(content, indent=2)}\n")


def write_text(path: Path, text: str) -> None:
    """Put a file there, whole or not at all."""
    with writing(path):
        write_file(path, [text.encode()])
