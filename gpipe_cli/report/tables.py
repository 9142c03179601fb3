"""Results as tables on stdout: pairs of name and value, rows that fit the width of the terminal, predictions, and the
results of a sweep."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpipe_cli.errors import INTERRUPTED, PeerError, Stopped
from gpipe_cli.report.formatting import LEAST_TEXT, format_value, one_line, whole_words
from gpipe_cli.values import lower_is_better

PIPE_WIDTH = 500
COLUMN_GAP = 2
FOLDED = ("overrides", "result", "description")
"""Columns whose text is folded on a narrow terminal."""
CHECK_COLORS = {"ok": "green", "note": "yellow", "problem": "bold red", "skipped": "dim"}
TO_DO = "to do: "
Rows = Sequence[Mapping[str, Any]]


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Two columns, name and value."""
    width = max(map(cell_len, facts), default=0) + COLUMN_GAP
    rows = [Text(title, style="italic")] if title else []
    for name, value in facts.items():
        line = whole_words(f"{name:<{width}}{one_line(format_value(name, value))}", _width(), width)
        rows.append(Text(line))
        rows[-1].stylize("bold", 0, len(name))
    show(*rows, soft_wrap=True)


def print_rows(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, optional: Sequence[str] = ()
) -> None:
    show(rows_table(title, columns, rows, optional=optional))


def rows_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, optional: Sequence[str] = ()
) -> RenderableType:
    """A narrow terminal folds headings and text. If that is not enough, columns of `optional` are left out, the first
    one first; if the others are still too wide, each row becomes a paragraph with all columns."""
    cells = [
        [one_line(format_value(name, cell)) for name, cell in zip(columns, row, strict=True)] for row in rows
    ]
    ranges = [_width_range(name, [row[index] for row in cells]) for index, name in enumerate(columns)]
    shown = list(range(len(columns)))

    def room() -> int:
        """What is left of the width if each column has as little as it needs."""
        return _width() - sum(ranges[index][0] + COLUMN_GAP for index in shown) + COLUMN_GAP

    for name in optional:
        if room() < 0 and name in columns:
            shown.remove(columns.index(name))
    if (left := room()) < 0:
        return _paragraphs(title, columns, cells)
    if hidden := [name for index, name in enumerate(columns) if index not in shown]:
        title = f"{title}; no room for {', '.join(hidden)}"
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index in shown:
        least, most = ranges[index]
        width = min(most, least + left)
        left -= width - least
        table.add_column(columns[index], overflow="fold", width=width)
    for row in cells:
        table.add_row(*(Text(row[index]) for index in shown))
    return Group(Text(title, style="italic"), table)


def _width() -> int:
    return Console().width if sys.stdout.isatty() else PIPE_WIDTH


def _width_range(name: str, cells: Sequence[str]) -> tuple[int, int]:
    """The least and the greatest useful width of a column: words are not cut, and only text is folded."""
    heading, widest = max(map(cell_len, name.split())), max(map(cell_len, cells), default=0)
    least = widest
    if name in FOLDED:
        words = (cell_len(word) for cell in cells for word in cell.split())
        least = max(min(widest, LEAST_TEXT), *words, 0)
    return max(heading, least), max(cell_len(name), widest)


def _paragraphs(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    parts: list[RenderableType] = [Text(title, style="italic")]
    for first, *others in rows:
        cells = [pair for pair in zip(columns[1:], others, strict=True) if pair[1] not in ("", "-")]
        facts = ", ".join(f"{name} {cell}" for name, cell in cells if name not in FOLDED)
        texts = [facts, *(cell for name, cell in cells if name in FOLDED)]
        parts.append(Text(first if columns[0] == "name" else f"{columns[0]} {first}", style="bold"))
        parts += [Padding(Text(text), (0, 0, 0, 2)) for text in texts if text]
    return Group(*parts)


def show(*parts: RenderableType, soft_wrap: bool = False) -> None:
    """Print to stdout: as wide as the terminal, or into a pipe without folding and without trailing spaces."""
    if sys.stdout.isatty():
        Console().print(*parts, sep="\n", soft_wrap=soft_wrap)
        return
    console = Console(width=PIPE_WIDTH)
    with console.capture() as captured:
        console.print(*parts, sep="\n", soft_wrap=soft_wrap)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    sys.stdout.flush()


def print_check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows of `gpipe check`. What to do follows on a line of its own, so that it can be long."""
    if sys.stdout.isatty():
        show(_check_table(rows))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        sys.stdout.write(f"{row['verdict']:<7}  {row['name']:<{width}}  {one_line(row['result'])}\n")
        if row["to_do"]:
            sys.stdout.write(f"{'':<9}{TO_DO}{one_line(row['to_do'])}\n")


def _check_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("verdict", "check"):
        table.add_column(column, no_wrap=True)
    table.add_column("result", overflow="fold")
    for row in rows:
        result = Text(one_line(row["result"]))
        if row["to_do"]:
            result.append(f"\n{TO_DO}{one_line(row['to_do'])}", style="bold")
        table.add_row(
            Text(row["verdict"], style=CHECK_COLORS.get(row["verdict"], "")), Text(row["name"]), result
        )
    return table


def csv_text(rows: Rows) -> str:
    """One line per prediction; columns of the second class are `class_2` and so on."""
    columns, lines = _flat(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *lines])
    return text.getvalue()


def print_predictions(rows: Rows) -> None:
    """The likeliest class, or the most frequent one of a mask, in columns of its own; the others in the last column."""
    if any("outputs" in row for row in rows):
        columns, lines = _flat(rows)
        print_rows(_title(rows), columns, lines)
        return
    measure = "share" if any("share" in entry for row in rows for entry in row["classes"]) else "probability"
    has_masks = any("mask" in row for row in rows)
    table = []
    for row in rows:
        best, *others = row["classes"]
        then = ", ".join(f"{entry['class']} {_percent(entry[measure])}" for entry in others)
        masks = [row.get("mask")] if has_masks else []
        table.append((row["file"], *masks, best["class"], _percent(best[measure]), then))
    columns = ["file", *(["mask"] if has_masks else []), "class", measure, "then"]
    print_rows(_title(rows), columns, table, optional=("then",))


def _title(rows: Rows) -> str:
    return f"{len(rows)} prediction{'' if len(rows) == 1 else 's'}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _flat(rows: Rows) -> tuple[list[str], list[list[Any]]]:
    """The names of the columns, and the values of each row."""
    records = []
    for row in rows:
        record = {name: row[name] for name in ("file", "mask") if name in row}
        outputs = row.get("outputs", [])
        record |= {
            _column("prediction", place, len(outputs) > 1): output for place, output in enumerate(outputs)
        }
        for place, entry in enumerate(row.get("classes", [])):
            values = {name: value for name, value in entry.items() if name != "index"}
            record |= {_column(name, place, place > 0): value for name, value in values.items()}
        records.append(record)
    columns = list(dict.fromkeys(name for record in records for name in record))
    return columns, [[record.get(name) for name in columns] for record in records]


def _column(name: str, place: int, numbered: bool) -> str:
    return f"{name}_{place + 1}" if numbered else name


@final
@dataclass(frozen=True)
class JobResult:
    """How a job ended; as long as it runs, how it would have ended if its process were killed."""

    job: int
    overrides: Sequence[str]
    label: str
    """The overrides that not all jobs have."""
    exit_code: int = PeerError.exit_code
    error: str | None = f"FAILED ({PeerError.exit_code}): its process was killed"
    """Why it failed or stopped."""
    finished_earlier: bool = False
    run_dir: str | None = None
    """None if it did not come so far, or is no training run."""
    best: float | None = None
    """The best value of the metric that decides, of all evaluations of its run."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Empty if it did not finish."""

    @property
    def stopped(self) -> bool:
        return self.exit_code in (Stopped.exit_code, INTERRUPTED)

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 and not self.stopped


def print_sweep(results: Sequence[JobResult], monitor: str | None, jobs: int, line: str) -> None:
    """monitor: the metric that decides; None for jobs that do not train. jobs: of the whole sweep.

    line: the command that repeats it.
    """
    values = [{f"best_{monitor}": result.best, **result.summary} for result in results]
    # Measured values are floats; the whole numbers and texts of a summary repeat the settings.
    measured = (name for row in values for name, value in row.items() if type(value) is float)
    columns = list(dict.fromkeys(measured))
    table = [
        (
            result.job,
            result.label,
            *map(row.get, columns),
            result.error or result.run_dir or row.get("run_dir"),
        )
        for result, row in zip(results, values, strict=True)
    ]
    print_rows(_sweep_title(results, jobs), ("job", "overrides", *columns, "result"), table)
    facts = {}
    if monitor is not None and (best := _best_job(results, monitor)) is not None:
        facts["best"] = f"job {best.job}: {best.label} ({monitor} {format_value(monitor, best.best)})"
    runs = list(dict.fromkeys(result.run_dir for result in results if result.run_dir is not None))
    if len(runs) > 1:
        facts["compare"] = shlex.join(["gpipe", "report", str(Path(runs[0]).parent)])
    if any(result.failed for result in results):
        facts["resume"] = line
    if facts:
        print_facts("", facts)


def print_sweep_json(results: Sequence[JobResult], monitor: str | None) -> None:
    best = None if monitor is None else _best_job(results, monitor)
    rows = [{**asdict(result), "best": result is best, **result.summary} for result in results]
    for row in rows:
        del row["summary"]
    sys.stdout.write(f"{json.dumps(rows)}\n")


def _sweep_title(results: Sequence[JobResult], jobs: int) -> str:
    counts = {
        "failed": sum(result.failed for result in results),
        "finished earlier": sum(result.finished_earlier for result in results),
        "stopped": sum(result.stopped for result in results),
        "not started": jobs - len(results),
    }
    shown = (f"{count} {name}" for name, count in counts.items() if count or name == "failed")
    return f"{jobs} jobs, {', '.join(shown)}"


def _best_job(results: Sequence[JobResult], monitor: str) -> JobResult | None:
    known = {result.best: result for result in reversed(results) if result.best is not None}
    return known[(min if lower_is_better(monitor) else max)(known)] if known else None
