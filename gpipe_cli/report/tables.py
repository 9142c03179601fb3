"""Results as tables on stdout: the end of a run, the partitions of a model, the jobs of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gpipe_cli.report.numbers import readable
from gpipe_cli.report.output import leave_stdout
from gpipe_cli.report.text import plain

WIDE = 500
LONG = ("overrides", "result", "description")  # columns that are folded where the terminal is narrow


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Two columns: name and value."""
    table = Table(title=title or None, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(plain(readable(name, value))))
    show(table)


def print_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in LONG)
    for row in rows:
        table.add_row(*(Text(plain(readable(name, cell))) for name, cell in zip(columns, row, strict=True)))
    show(table)


def show(*parts: RenderableType) -> None:
    """On a terminal as wide as that; in a pipe there is no edge to fold at, and no one to see padding."""
    if sys.stdout.isatty():
        Console().print(*parts, sep="\n")
        return
    console = Console(width=WIDE)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    try:
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
        sys.stdout.flush()
    except BrokenPipeError:
        leave_stdout()
