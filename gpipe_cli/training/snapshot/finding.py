"""Which snapshots a run has, and which of them to use.

The disk is asked each time: no file says `latest`, so none can be wrong. A snapshot is a real directory called
`step-` and eight digits; nothing else is looked at, and no link is followed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.errors import RunError
from gpipe_cli.training.snapshot.durable import UNFINISHED
from gpipe_cli.training.snapshot.manifest import FILES, MANIFEST
from gpipe_cli.training.snapshot.reading import Verified, read_snapshot

FOLDER = "snapshots"
_NAME = re.compile(r"step-(\d{8,})")


def snapshot_path(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step a snapshot of this name is of; None for any other name, and for a link."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and path.is_dir() and not path.is_symlink() else None


def snapshot_paths(run: Path) -> list[Path]:
    """Newest first, damaged ones too."""
    folder = run / FOLDER
    found = {path: step_of(path) for path in folder.iterdir()} if folder.is_dir() else {}
    steps = {path: step for path, step in found.items() if step is not None}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def unfinished_paths(run: Path) -> list[Path]:
    """What a process that was killed left half-written or half-removed."""
    folder = run / FOLDER
    names = folder.iterdir() if folder.is_dir() else ()
    return [
        path
        for path in names
        if _NAME.fullmatch(path.name.removesuffix(UNFINISHED)) and path.suffix == UNFINISHED
    ]


@final
@dataclass(frozen=True)
class Found:
    newest: Verified | None
    damaged: dict[Path, RunError]
    """Newer ones that cannot be used, each with the reason."""


def newest_valid(run: Path, wanted: Collection[str] = FILES) -> Found:
    damaged: dict[Path, RunError] = {}
    for path in snapshot_paths(run):
        try:
            return Found(read_snapshot(path, wanted), damaged)
        except RunError as error:
            damaged[path] = error
    return Found(None, damaged)


def is_snapshot(path: Path) -> bool:
    return (path / MANIFEST).is_file() or _NAME.fullmatch(path.name) is not None


def run_of(snapshot: Path) -> Path:
    """The run directory a snapshot is in."""
    return snapshot.absolute().parents[1]
