"""Predictions as a table on a terminal, or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from gpipe_cli.report.tables import print_rows

Rows = Sequence[Mapping[str, Any]]


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
        file = f"{row['file']}:{row['line']}" if "line" in row else row["file"]
        table.append((file, *masks, best["class"], _percent(best[measure]), then))
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
        record = {name: row[name] for name in ("file", "line", "mask") if name in row}
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
