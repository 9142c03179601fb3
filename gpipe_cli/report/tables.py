"""Results as tables on stdout: the end of a run, the partitions of a model, the jobs of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gpipe_cli.report.numbers import readable
from gpipe_cli.report.text import plain

WIDE = 500
GAP = 2  # between two columns
LONG = ("overrides", "result", "description")  # columns that are folded where the terminal is narrow


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Two columns: name and value. A line is left to the terminal to break, so that a command in it can be copied."""
    width = max(map(cell_len, facts), default=0) + GAP
    rows = (
        Text.assemble((f"{name:<{width}}", "bold"), plain(readable(name, value)))
        for name, value in facts.items()
    )
    show(*([Text(title, style="italic")] if title else []), *rows, soft_wrap=True)


def print_rows(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, optional: Sequence[str] = ()
) -> None:
    """Columns of `optional` give way, the first of them first, where the terminal is too narrow for all."""
    cells = [[plain(readable(name, cell)) for name, cell in zip(columns, row, strict=True)] for row in rows]
    shown = _fitting(columns, cells, optional)
    left_out = [name for index, name in enumerate(columns) if index not in shown]
    if left_out:
        title = f"{title}; no room for {', '.join(left_out)}"
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for index in shown:
        table.add_column(columns[index], overflow="fold", no_wrap=columns[index] not in LONG)
    for row in cells:
        table.add_row(*(Text(row[index]) for index in shown))
    show(table)


def _fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str]) -> list[int]:
    """The places of the columns there is room for."""
    room = Console().width if sys.stdout.isatty() else WIDE
    widths = [max(cell_len(row[index]) for row in [columns, *rows]) + GAP for index in range(len(columns))]
    shown = list(range(len(columns)))
    for name in optional:
        if sum(widths[index] for index in shown) - GAP > room and name in columns:
            shown.remove(columns.index(name))
    return shown


def show(*parts: RenderableType, soft_wrap: bool = False) -> None:
    """On a terminal as wide as that; in a pipe there is no edge to fold at, and no one to see padding."""
    if sys.stdout.isatty():
        Console().print(*parts, sep="\n", soft_wrap=soft_wrap)
        return
    console = Console(width=WIDE)
    with console.capture() as captured:
        console.print(*parts, sep="\n", soft_wrap=soft_wrap)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    sys.stdout.flush()
