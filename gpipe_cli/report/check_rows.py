"""The rows of `gpipe check`: a table with colors on a terminal, plain lines in a pipe and in an issue."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from gpipe_cli.report.formatting import one_line
from gpipe_cli.report.tables import show

COLORS = {"ok": "green", "note": "yellow", "problem": "bold red", "skipped": "dim"}
TO_DO = "to do: "


def print_check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """What to do follows on a line of its own, so that it can be long."""
    if sys.stdout.isatty():
        show(_table(rows))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        sys.stdout.write(f"{row['verdict']:<7}  {row['name']:<{width}}  {one_line(row['result'])}\n")
        if row["to_do"]:
            sys.stdout.write(f"{'':<9}{TO_DO}{one_line(row['to_do'])}\n")


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("verdict", "check"):
        table.add_column(column, no_wrap=True)
    table.add_column("result", overflow="fold")
    for row in rows:
        result = Text(one_line(row["result"]))
        if row["to_do"]:
            result.append(f"\n{TO_DO}{one_line(row['to_do'])}", style="bold")
        table.add_row(Text(row["verdict"], style=COLORS.get(row["verdict"], "")), Text(row["name"]), result)
    return table
