"""The protocol of a logger, and what the loggers share: importing a package, the ids of runs, folders."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.safe_files import open_directory, open_regular, parse_json, read_regular, writing

_IDS_FILE = "logger.json"
_MAX_BYTES = 2**16
_ID = re.compile(r"[\w-]{1,64}", flags=re.ASCII)


@final
@dataclass(frozen=True)
class LoggedRun:
    directory: Path
    name: str
    config: Mapping[str, Any]
    """As saved, with references unresolved, so that it contains no secrets."""
    step: int
    """The step from which the run resumes; 0 for a new run."""


class Logger(Protocol):
    """Built before anything expensive happens, so that a missing package is reported at once; opened with the run."""

    def open(self, run: LoggedRun) -> None: ...
    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@final
class NoLogger:
    """logger=none: metrics go to metrics.jsonl only."""

    def open(self, run: LoggedRun) -> None:
        pass

    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


def import_package(package: str, option: str) -> Any:
    """Import the package of a service; gpipe installs none of them by default."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"logger={option}: {option} cannot be imported ({error}); install it: pip install {package}"
        ) from error


def load_id(run: LoggedRun, option: str) -> str | None:
    """Return the id that the service gave the run in an earlier launch, or None."""
    identity = _load_ids(run.directory).get(option)
    return identity if isinstance(identity, str) and _ID.fullmatch(identity) else None


def save_id(run: LoggedRun, option: str, identity: str) -> None:
    content = {**_load_ids(run.directory), option: identity}
    path = run.directory / _IDS_FILE
    with writing(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(open_regular(path, flags, base=run.directory), "w", encoding="utf-8") as file:
            json.dump(content, file)


def _load_ids(directory: Path) -> dict[str, Any]:
    path = directory / _IDS_FILE
    try:
        ids = parse_json(read_regular(path, _MAX_BYTES, base=directory))
    except (FileNotFoundError, ValueError):  # not written yet, or damaged: the service creates a new run
        return {}
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error}; remove it") from error
    return ids if isinstance(ids, dict) else {}


def make_folder(run: LoggedRun, name: str) -> Path:
    """Create a folder in the run directory for a service to write to; refuse a symbolic link to another one."""
    path = run.directory / name
    with writing(path):
        path.mkdir(exist_ok=True)
        with open_directory(path, run.directory):
            return path
