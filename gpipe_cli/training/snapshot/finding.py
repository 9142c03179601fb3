"""Which snapshots a run has, and which of them to use.

The disk is asked each time: no file says `latest`, so none can be wrong. A snapshot is a real directory called
`step-` and eight digits; nothing else is looked at, and no link is followed, `snapshots` itself included.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.errors import RunError
from gpipe_cli.safe_files import open_directory
from gpipe_cli.training.snapshot.durable import UNFINISHED
from gpipe_cli.training.snapshot.manifest import FILES, MANIFEST
from gpipe_cli.training.snapshot.reading import Verified, read_snapshot

FOLDER = "snapshots"
_NAME = re.compile(r"step-(\d{8,18})", flags=re.ASCII)


def snapshot_path(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08d}"


def named_step(path: Path) -> int | None:
    """The step that the name of a snapshot tells; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def snapshot_paths(run: Path) -> list[Path]:
    """Newest first, damaged ones too."""
    found = [run / FOLDER / name for name, is_directory in _entries(run).items() if is_directory]
    steps = {path: step for path in found if (step := named_step(path)) is not None}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def unfinished_paths(run: Path) -> list[Path]:
    """What a process that was killed left half-written or half-removed."""
    names = (name for name in _entries(run) if name.endswith(UNFINISHED))
    return [run / FOLDER / name for name in names if _NAME.fullmatch(name.removesuffix(UNFINISHED))]


def _entries(run: Path) -> dict[str, bool]:
    """What lies among the snapshots, and whether it is a directory; nothing where they have no folder yet."""
    try:
        with open_directory(run / FOLDER, run) as folder, os.scandir(folder) as entries:
            return {one.name: one.is_dir(follow_symlinks=False) for one in entries}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError(f"{run / FOLDER}: cannot be read: {error}") from error


@final
@dataclass(frozen=True)
class Found:
    newest: Verified | None
    damaged: dict[Path, RunError]
    """Newer ones that cannot be used, each with the reason."""


def newest_valid(run: Path, wanted: Collection[str] = FILES, ignored: Collection[str] = ()) -> Found:
    """wanted, ignored: as for `read_snapshot`."""
    damaged: dict[Path, RunError] = {}
    for path in snapshot_paths(run):
        try:
            return Found(read_snapshot(path, wanted, ignored), damaged)
        except RunError as error:
            damaged[path] = error
    return Found(None, damaged)


def is_snapshot(path: Path) -> bool:
    return os.path.lexists(path / MANIFEST) or named_step(path) is not None


def run_of(snapshot: Path) -> Path:
    """The run directory a snapshot is in."""
    return snapshot.absolute().parents[1]
