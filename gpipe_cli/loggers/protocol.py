"""What a logger is to a run, and how one says that its package is missing."""

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

__all__ = ["Logged", "Logger", "flat", "known_id", "own_folder", "remember_id", "required"]

IDENTITIES = "logger.json"
LARGEST = 2**16
IDENTITY = re.compile(r"[\w-]{1,64}", flags=re.ASCII)


@final
@dataclass(frozen=True)
class Logged:
    """The run that is logged."""

    directory: Path
    name: str
    config: Mapping[str, Any]
    """As it is saved: references are not resolved, so no secret is in it."""
    step: int
    """From which it goes on; 0 for a new one."""


class Logger(Protocol):
    """Made before anything expensive, so that a missing package is told at once; opened with the run."""

    def open(self, run: Logged) -> None: ...
    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def required(package: str, option: str) -> Any:
    """The package of a service; None of them is installed with gpipe."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"logger={option}: {option} cannot be imported ({error}); install it: pip install 'gpipe-cli[{option}]'"
        ) from error


def known_id(run: Logged, option: str) -> str | None:
    """Under which name the service knows the run from an earlier launch."""
    found = _identities(run.directory).get(option)
    return found if isinstance(found, str) and IDENTITY.fullmatch(found) else None


def remember_id(run: Logged, option: str, identity: str) -> None:
    content = {**_identities(run.directory), option: identity}
    path = run.directory / IDENTITIES
    with writing(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(open_regular(path, flags, base=run.directory), "w", encoding="utf-8") as file:
            json.dump(content, file)


def own_folder(run: Logged, name: str) -> Path:
    """A folder in the run directory for what a service writes there; no link to another one."""
    path = run.directory / name
    with writing(path):
        path.mkdir(exist_ok=True)
        with open_directory(path, run.directory):
            return path


def _identities(directory: Path) -> dict[str, Any]:
    path = directory / IDENTITIES
    try:
        found = parse_json(read_regular(path, LARGEST, base=directory))
    except (FileNotFoundError, ValueError):  # none yet, or one that is of no use
        return {}
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error}; remove it") from error
    return found if isinstance(found, dict) else {}


def flat(node: Any, path: str = "") -> dict[str, Any]:
    """Dotted key and value of all that is no mapping."""
    if not isinstance(node, Mapping):
        return {path: node}
    return {
        key: value
        for name, child in node.items()
        for key, value in flat(child, f"{path}.{name}" if path else str(name)).items()
    }
