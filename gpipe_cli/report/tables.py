"""Results as tables on stdout: pairs of name and value, and rows that fit the width of the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gpipe_cli.report.formatting import format_value, one_line

PIPE_WIDTH = 500
COLUMN_GAP = 2
FOLDED = ("overrides", "result", "description")
"""Columns whose text is folded on a narrow terminal."""


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Two columns, name and value. The terminal wraps long lines, so that a command in one can be copied."""
    width = max(map(cell_len, facts), default=0) + COLUMN_GAP
    rows = (
        Text.assemble((f"{name:<{width}}", "bold"), one_line(format_value(name, value)))
        for name, value in facts.items()
    )
    show(*([Text(title, style="italic")] if title else []), *rows, soft_wrap=True)


def print_rows(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, optional: Sequence[str] = ()
) -> None:
    show(rows_table(title, columns, rows, optional=optional))


def rows_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, optional: Sequence[str] = ()
) -> Table:
    """On a terminal that is too narrow for all columns, leave those of `optional` out, the first one first."""
    cells = [
        [one_line(format_value(name, cell)) for name, cell in zip(columns, row, strict=True)] for row in rows
    ]
    available = Console().width if sys.stdout.isatty() else PIPE_WIDTH
    widths = [max(cell_len(row[index]) for row in [columns, *cells]) for index in range(len(columns))]
    shown = list(range(len(columns)))
    for name in optional:
        needed = sum(widths[index] + COLUMN_GAP for index in shown) - COLUMN_GAP
        if needed > available and name in columns:
            shown.remove(columns.index(name))
    hidden = [name for index, name in enumerate(columns) if index not in shown]
    if hidden:
        title = f"{title}; no room for {', '.join(hidden)}"
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for index in shown:
        table.add_column(columns[index], overflow="fold", no_wrap=columns[index] not in FOLDED)
    for row in cells:
        table.add_row(*(Text(row[index]) for index in shown))
    return table


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
