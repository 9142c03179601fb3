"""A run directory taken back to where a snapshot stands, so that a resumed run leaves no gap and no repeat.

Nothing that was valid is destroyed: snapshots of a future that is given up, and damaged ones, are set aside.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path

from gpipe_cli.errors import RunError
from gpipe_cli.safe_files import open_directory, open_regular, parse_json
from gpipe_cli.training.loop import Position
from gpipe_cli.training.snapshot.durable import remove
from gpipe_cli.training.snapshot.finding import named_step, snapshot_paths, unfinished_paths

ASIDE = ".aside"
LONGEST_ROW = 2**20
"""Bytes; a row has a few hundred."""


def rewind_snapshots(run: Path, step: int, used: Path | None) -> list[str]:
    """Set aside every snapshot that is not older than the one used; sweep up what was left half-written."""
    for path in unfinished_paths(run):
        remove(path, run)
    newer = [path for path in snapshot_paths(run) if (named_step(path) or 0) >= step]
    return [_set_aside(path, run) for path in newer if used is None or not path.samefile(used)]


def rewind_metrics(path: Path, position: Position) -> None:
    """Cut metrics.jsonl after the last row that the position has seen; torn lines at its end go too."""
    cut_metrics(path, seen_bytes(path, position))


def cut_metrics(path: Path, kept: int) -> None:
    with suppress(FileNotFoundError):
        descriptor = open_regular(path, os.O_RDWR, base=path.parent)
        try:
            os.ftruncate(descriptor, kept)
        finally:
            os.close(descriptor)


def seen_bytes(path: Path, position: Position) -> int:
    """How many bytes of metrics.jsonl are rows that the position has seen; nothing is changed.

    A power cut leaves half a line or zeros at the end. Anything else that is no row is refused before rows are lost.
    """
    try:
        descriptor = open_regular(path, base=path.parent)
    except FileNotFoundError:
        return 0
    kept = end = torn = number = 0
    with os.fdopen(descriptor, "rb") as file:
        while line := file.readline(LONGEST_ROW + 1):
            number, end = number + 1, end + len(line)
            if len(line) <= LONGEST_ROW and (not line.endswith(b"\n") or b"\0" in line):
                torn = torn or number
                continue
            try:
                if not _was_seen(line, position):
                    break
                if torn:
                    raise ValueError("it is cut short, and others follow it")
            except ValueError as error:
                raise RunError(
                    f"{path}: line {torn or number} is no row of metrics: {error}; repair it, or remove the file "
                    "to resume without earlier rows"
                ) from error
            kept = end
    return kept


def _was_seen(line: bytes, position: Position) -> bool:
    if len(line) > LONGEST_ROW:
        raise ValueError("it is longer than any")
    match parse_json(line):
        case {"step": int(step), "split": str(split)} if type(step) is int and step >= 0:
            return step < position.step or (step == position.step and (position.evaluated or split != "eval"))
    raise ValueError("it has no step and split")


def _set_aside(path: Path, run: Path) -> str:
    with open_directory(path.parent, run) as parent:
        for attempt in itertools.count(1):
            name = f"{path.name}{ASIDE}{'' if attempt == 1 else f'-{attempt}'}"
            if not os.path.lexists(path.with_name(name)):
                os.rename(path.name, name, src_dir_fd=parent, dst_dir_fd=parent)
                return name
    raise AssertionError("unreachable: the loop above has no end")
