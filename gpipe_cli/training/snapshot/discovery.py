"""The snapshots of a run: their names, the newest valid one, and setting aside those a resumed run gives up.

The disk is asked each time: there is no `latest` file that could be wrong. A snapshot is a real directory called
`step-` and eight digits. Everything else is ignored, and no link is followed, `snapshots` itself included.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.errors import RunError
from gpipe_cli.safe_files import open_directory
from gpipe_cli.training.snapshot.durable import UNFINISHED, remove
from gpipe_cli.training.snapshot.manifest import FILES, MANIFEST, VerifiedSnapshot, read_snapshot

SNAPSHOTS = "snapshots"
ASIDE = ".aside"
_NAME = re.compile(r"step-(\d{8,18})", flags=re.ASCII)


@final
@dataclass(frozen=True)
class SnapshotSearch:
    newest: VerifiedSnapshot | None
    damaged: dict[Path, RunError]
    """Newer snapshots that cannot be used, each with the reason."""


def snapshot_path(run: Path, step: int) -> Path:
    return run / SNAPSHOTS / f"step-{step:08d}"


def snapshot_step(path: Path) -> int | None:
    """The step in the name of a snapshot; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def is_snapshot(path: Path) -> bool:
    return os.path.lexists(path / MANIFEST) or snapshot_step(path) is not None


def run_directory_of(snapshot: Path) -> Path:
    return snapshot.absolute().parents[1]


def snapshot_paths(run: Path) -> list[Path]:
    """Newest first, damaged ones included."""
    paths = [run / SNAPSHOTS / name for name, is_directory in _entries(run).items() if is_directory]
    steps = {path: step for path in paths if (step := snapshot_step(path)) is not None}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def unfinished_paths(run: Path) -> list[Path]:
    """What a killed process left half-written or half-removed."""
    names = (name for name in _entries(run) if name.endswith(UNFINISHED))
    return [run / SNAPSHOTS / name for name in names if _NAME.fullmatch(name.removesuffix(UNFINISHED))]


def newest_valid_snapshot(
    run: Path, wanted: Collection[str] = FILES, ignored: Collection[str] = ()
) -> SnapshotSearch:
    """wanted, ignored: as for `read_snapshot`."""
    damaged: dict[Path, RunError] = {}
    for path in snapshot_paths(run):
        try:
            return SnapshotSearch(read_snapshot(path, wanted, ignored), damaged)
        except RunError as error:
            damaged[path] = error
    return SnapshotSearch(None, damaged)


def rewind_snapshots(run: Path, step: int, used: Path | None) -> list[str]:
    """Set aside every snapshot of `step` or later except the one used, and remove half-written ones.

    Nothing valid is destroyed: the snapshots that the resumed run gives up, and damaged ones, get another name.
    """
    for path in unfinished_paths(run):
        remove(path, run)
    newer = [path for path in snapshot_paths(run) if (snapshot_step(path) or 0) >= step]
    return [_set_aside(path, run) for path in newer if used is None or not path.samefile(used)]


def _set_aside(path: Path, run: Path) -> str:
    with open_directory(path.parent, run) as parent:
        for attempt in itertools.count(1):
            name = f"{path.name}{ASIDE}{'' if attempt == 1 else f'-{attempt}'}"
            if not os.path.lexists(path.with_name(name)):
                os.rename(path.name, name, src_dir_fd=parent, dst_dir_fd=parent)
                return name
    raise AssertionError("unreachable: the loop above has no end")


def _entries(run: Path) -> dict[str, bool]:
    """The names in the folder of snapshots, each with whether it is a directory; none where there is no folder."""
    try:
        with open_directory(run / SNAPSHOTS, run) as folder, os.scandir(folder) as entries:
            return {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError(f"{run / SNAPSHOTS}: cannot be read: {error}") from error
