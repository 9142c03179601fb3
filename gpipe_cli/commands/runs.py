"""gpipe runs: a table of the training runs below a folder, once or until Ctrl-C. Reads files only, without torch."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.live import Live

from gpipe_cli.activity import activity
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import RunsConfig
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.report.formatting import format_value, hidden_character, one_line
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.comparison import run_labels
from gpipe_cli.report.tables import print_facts, rows_table, show
from gpipe_cli.runs.reader import DAMAGED, SWEEP, RunReader, RunRow, find_runs, read_row
from gpipe_cli.training.signals import StopNow

COLUMNS = ("run", "differs", "state", "step", "last", "best", "age", "size", "note")
MAYBE = ("differs", "note")
"""Columns that are left out if no row has them."""
OPTIONAL = ("note", "age", "best", "size")
BROKEN = ("failed", "crashed", DAMAGED)
MAX_DELETED = 10
"""Runs in one line."""
REFRESH_SECONDS = 2.0
MAX_NOTE = 60
AGE_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def run(settings: RunsConfig, job: Job) -> list[Summary]:
    root = Path(settings.folder)
    if not root.is_dir():
        raise RunError(f"{root}: no such directory; give the folder of your runs: gpipe runs <directory>")
    if settings.watch:
        _watch(root, job)
        return []
    activity.now("looking for runs")
    runs, is_all = find_runs(root)
    rows = _rows(runs)
    if job.shows_result:
        show(_table(root, rows))
        print_facts("", _deletions(rows))
    if not is_all:
        print_status(f"{root}: has too many files; runs in its depths are missing: gpipe runs <directory>")
    return [asdict(row) for row in rows]


def _rows(runs: Sequence[Path]) -> list[RunRow]:
    """The run that changed last is the last row, next to the prompt."""
    labels: dict[Path, str] = {}
    for folder in {run.parent for run in runs}:
        if (folder / SWEEP).exists():
            own = [run for run in runs if run.parent == folder]
            labels |= dict(zip(own, run_labels([RunReader(run).config for run in own]), strict=True))
    rows = [replace(read_row(run), differs=labels.get(run, "")) for run in runs]
    return sorted(rows, key=lambda row: (row.changed, row.run))


def _deletions(rows: Sequence[RunRow]) -> dict[str, str]:
    """The lines that delete the largest run, and those that ended without a result."""
    ended = [row for row in rows if row.state != "running" and hidden_character(row.run) is None]
    largest = sorted(ended, key=lambda row: -row.bytes)[:1]
    broken = [row for row in ended if row.state in BROKEN][:MAX_DELETED]
    lines = {"delete_largest": largest, "delete_broken": broken}
    return {name: shlex.join(["rm", "-r", *map(_word, own)]) for name, own in lines.items() if own}


def _word(row: RunRow) -> str:
    return f"./{row.run}" if row.run.startswith("-") else row.run


def _watch(root: Path, job: Job) -> None:
    if job.json or not sys.stdout.isatty():
        raise ConfigError("--watch refreshes a table on a terminal; remove it for a pipe or --json")
    console = Console()
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(_table(root, _rows(find_runs(root)[0]), _room(console)), refresh=True)
                time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt as stop:
        if isinstance(stop, StopNow) and not stop.request.by_keyboard:
            raise
    show(_table(root, _rows(find_runs(root)[0]), _room(console)))


def _room(console: Console) -> int:
    """How many rows fit besides the title, the header and the line of the cursor."""
    return max(1, console.height - 3)


def _table(root: Path, rows: Sequence[RunRow], room: int | None = None) -> Any:
    running = sum(row.state == "running" for row in rows)
    count = f"{len(rows)} {'run' if len(rows) == 1 else 'runs'}"
    size = format_value("bytes", sum(row.bytes for row in rows))
    title = f"{count} in {one_line(str(root.absolute()))}, {running} running, {size}"
    now = time.time()
    cells = [_cells(row, root, now) for row in rows][-(room or len(rows)) :]
    used = [at for at, name in enumerate(COLUMNS) if name not in MAYBE or any(row[at] for row in cells)]
    shown = [[row[at] for at in used] for row in cells]
    return rows_table(title, [COLUMNS[at] for at in used], shown, optional=OPTIONAL)


def _cells(row: RunRow, root: Path, now: float) -> tuple[str, ...]:
    path = Path(row.run)
    last = "-" if row.train_loss is None else f"train loss {format_value('loss', row.train_loss)}"
    best = "-"
    if row.last is not None:
        last = f"{row.metric} {format_value(row.metric, row.last)}"
    if row.best is not None:
        place = "" if row.best_step is None else f" at {row.best_step}"
        best = f"{row.metric} {format_value(row.metric, row.best)}{place}"
    return (
        str(path.relative_to(root)) if path != root else str(path),
        shorten(row.differs, MAX_NOTE, placeholder="..."),
        row.state,
        "-" if row.step is None else f"{row.step}/{row.steps}" if row.steps is not None else str(row.step),
        last,
        best,
        _age(now - row.changed),
        format_value("bytes", row.bytes),
        shorten(one_line(row.note), MAX_NOTE, placeholder="..."),
    )


def _age(seconds: float) -> str:
    """The time in its largest unit, such as 3h."""
    name, unit = next((pair for pair in AGE_UNITS if seconds >= pair[1]), AGE_UNITS[-1])
    return f"{max(0, int(seconds // unit))}{name}"
