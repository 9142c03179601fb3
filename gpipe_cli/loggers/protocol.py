"""What a logger is to a run, and how one says that its package is missing."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from gpipe_cli.errors import ConfigError

__all__ = ["Logged", "Logger", "flat", "known_id", "remember_id", "required"]

IDENTITIES = "logger.json"
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
    (run.directory / IDENTITIES).write_text(json.dumps(content), encoding="utf-8")


def _identities(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / IDENTITIES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # none yet, or one that is of no use
        return {}
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
