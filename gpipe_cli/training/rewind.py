"""A run directory taken back to where a snapshot stands, so that a resumed run leaves no gap and no repeat.

Nothing that was valid is destroyed: snapshots of a future that is given up, and damaged ones, are set aside.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

from gpipe_cli.training.loop import Position
from gpipe_cli.training.snapshot.durable import remove
from gpipe_cli.training.snapshot.finding import snapshot_paths, step_of, unfinished_paths

ASIDE = ".aside"


def rewind_snapshots(run: Path, step: int, used: Path | None) -> list[str]:
    """Set aside every snapshot that is not older than the one used; sweep up what was left half-written."""
    for path in unfinished_paths(run):
        remove(path)
    newer = [path for path in snapshot_paths(run) if (step_of(path) or 0) >= step]
    return [_set_aside(path).name for path in newer if used is None or not path.samefile(used)]


def rewind_metrics(path: Path, position: Position) -> None:
    """Cut metrics.jsonl after the last row that the position has seen; a torn last line goes too."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or not _was_seen(line, position):
                break
            kept += len(line)
    os.truncate(path, kept)


def _was_seen(line: bytes, position: Position) -> bool:
    try:
        row: Any = json.loads(line)
        step, is_evaluation = int(row["step"]), row["split"] == "eval"
    except (ValueError, KeyError, TypeError):
        return False
    return step < position.step or (step == position.step and (position.evaluated or not is_evaluation))


def _set_aside(path: Path) -> Path:
    for attempt in itertools.count(1):
        place = path.with_name(f"{path.name}{ASIDE}{'' if attempt == 1 else f'-{attempt}'}")
        if not place.exists():
            return path.rename(place)
    raise AssertionError("unreachable: the loop above has no end")
