"""gpipe runs: a table of the training runs below a folder, once or until Ctrl-C. Reads files only, without torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.live import Live

from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import RunsConfig
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.report.formatting import format_value, one_line
from gpipe_cli.report.tables import rows_table, show
from gpipe_cli.runs.reader import RunRow, find_runs, read_row
from gpipe_cli.training.signals import StopNow

COLUMNS = ("run", "state", "step", "last", "best", "age", "size", "note")
OPTIONAL = ("note", "size", "age", "best")
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
    rows = _rows(root)
    if job.shows_result:
        show(_table(root, rows))
    return [asdict(row) for row in rows]


def _rows(root: Path) -> list[RunRow]:
    """The run that changed last is the last row, next to the prompt."""
    return sorted(map(read_row, find_runs(root)), key=lambda row: (row.changed, row.run))


def _watch(root: Path, job: Job) -> None:
    if job.json or not sys.stdout.isatty():
        raise ConfigError("--watch refreshes a table on a terminal; remove it for a pipe or --json")
    console = Console()
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(_table(root, _rows(root), _room(console)), refresh=True)
                time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt as stop:
        if isinstance(stop, StopNow) and not stop.request.by_keyboard:
            raise
    show(_table(root, _rows(root), _room(console)))


def _room(console: Console) -> int:
    """How many rows fit besides the title, the header and the line of the cursor."""
    return max(1, console.height - 3)


def _table(root: Path, rows: Sequence[RunRow], room: int | None = None) -> Any:
    running = sum(row.state == "running" for row in rows)
    title = f"{len(rows)} {'run' if len(rows) == 1 else 'runs'} in {one_line(str(root))}, {running} running"
    now = time.time()
    cells = [_cells(row, root, now) for row in rows]
    return rows_table(title, COLUMNS, cells if room is None else cells[-room:], optional=OPTIONAL)


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
