"""One row per run for `gpipe runs`: state, step, metrics, age and size, from the files of the run directory.

Nothing in the files is trusted. A directory that cannot be read becomes a row that says why. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import RunError
from gpipe_cli.report.page.run_files import RunFiles, as_int, as_number, parse_or_none, watched_metric
from gpipe_cli.runs.state import LOCK_NAME, OUTCOME, run_state
from gpipe_cli.safe_files import read_regular
from gpipe_cli.values import lower_is_better

DAMAGED = "damaged"
"""The state of a run directory whose files cannot be read."""
METRICS = "metrics.jsonl"
MAX_METRICS_BYTES = 256 * 2**20
LAST_ROWS = 2
"""Of the file: a row of training, and perhaps the evaluation after it."""
MOST_STEPS = 10**12
MAX_ENTRIES = 200_000
"""Files and folders below one directory; a walk ends there."""
MAX_DEPTH = 8


@final
@dataclass(frozen=True)
class RunRow:
    run: str
    state: str
    step: int | None = None
    steps: int | None = None
    """Of the whole run, if known."""
    metric: str = "loss"
    """The metric that decides the best snapshot."""
    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    train_loss: float | None = None
    """The last one, which is all there is before the first evaluation."""
    changed: float = 0.0
    """When a file of the run changed last, in seconds since 1970."""
    bytes: int = 0
    note: str = ""
    """Why it stopped or failed, or what is wrong with its files."""


def find_runs(root: Path) -> Iterator[Path]:
    """The training runs at or below a folder; symbolic links are not followed."""
    return (folder for folder, names in _folders(root) if _is_run(names))


def _is_run(names: set[str]) -> bool:
    """Whether a folder with these entries is a training run, or what is left of one.

    A lone config.yaml may be anything, and a sweep's directory is locked too.
    """
    return (
        bool(
            names & {LOCK_NAME, OUTCOME, "metrics.jsonl", "summary.json"}
            or {"config.yaml", "overrides.yaml"} <= names
        )
        and "profile.json" not in names
        and "sweep.json" not in names
    )


def _folders(root: Path) -> Iterator[tuple[Path, set[str]]]:
    """Each folder with the names of its entries; what is inside a run is no run."""
    left = MAX_ENTRIES
    waiting = [(root, 0)]
    while waiting and left > 0:
        folder, depth = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                listed = list(entries)
        except OSError as error:
            if folder == root:
                raise RunError(f"{root}: cannot be read: {error.strerror or error}") from error
            continue
        left -= len(listed)
        names = {entry.name for entry in listed}
        yield folder, names
        if not _is_run(names) and depth < MAX_DEPTH:
            below = (entry for entry in listed if entry.is_dir(follow_symlinks=False))
            waiting += [(Path(entry.path), depth + 1) for entry in below if not entry.name.startswith(".")]


def read_row(directory: Path) -> RunRow:
    changed, size = _changed_and_size(directory)
    files = RunFiles(directory)
    try:
        state = run_state(directory)
    except RunError as error:
        reason = str(error).removeprefix(f"{directory}: ")
        return RunRow(str(directory), DAMAGED, changed=changed, bytes=size, note=reason)
    launch, summary = files.json("launch.json"), files.json("summary.json")
    metric = watched_metric(files.text("config.yaml"))
    rows, problems = _metric_rows(directory)
    problems += [problem.partition(";")[0] for problem in files.problems]
    values = [
        (value, row.get("step"))
        for row in rows
        if row.get("split") == "eval" and (value := as_number(row.get(metric))) is not None
    ]
    best, best_step = (min if lower_is_better(metric) else max)(
        values, key=itemgetter(0), default=(None, None)
    )
    trained = [row for row in rows if row.get("split") == "train"]
    return RunRow(
        str(directory),
        "dead" if state is None else state.name,
        step=as_int(rows[-1].get("step"), MOST_STEPS) if rows else 0,
        steps=as_int(summary.get("steps", launch.get("steps")), MOST_STEPS),
        metric=metric,
        last=values[-1][0] if values else None,
        best=best,
        best_step=as_int(best_step, MOST_STEPS),
        train_loss=as_number(trained[-1].get("loss")) if trained else None,
        changed=changed,
        bytes=size,
        note="; ".join([*([state.reason] if state and state.reason else []), *problems]),
    )


def _metric_rows(directory: Path) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Every evaluation and the last rows, and what is wrong with the file.

    The other rows are not parsed: a run may have a million of them.
    """
    try:
        content = read_regular(directory / METRICS, MAX_METRICS_BYTES, base=directory)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{METRICS}: cannot be read: {error}"]
    # A run that is training, or was killed, may leave half a line at the end.
    lines = content.split(b"\n")[:-1]
    parsed = [
        parse_or_none(line)
        for number, line in enumerate(lines)
        if b'"eval"' in line or number >= len(lines) - LAST_ROWS
    ]
    rows: list[Mapping[str, Any]] = [row for row in parsed if isinstance(row, dict)]
    damaged = len(parsed) - len(rows)
    return rows, [f"{METRICS}: {damaged} damaged lines"] if damaged else []


def _changed_and_size(directory: Path) -> tuple[float, int]:
    """When something in the run directory changed last, and the bytes of all its files."""
    changed, size, left = 0.0, 0, MAX_ENTRIES
    waiting = [str(directory)]
    while waiting and left > 0:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    left -= 1
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        size += status.st_size
                        changed = max(changed, status.st_mtime)
        except OSError:  # removed meanwhile, or not readable: what is left still has a size
            continue
    return changed, size
