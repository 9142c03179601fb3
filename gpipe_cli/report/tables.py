"""Results as tables on stdout: the end of a run, the partitions of a model, the jobs of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpipe_cli.report.text import plain

WIDE = 500


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Two columns: name and value."""
    table = Table(title=title or None, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(plain(readable(name, value))))
    _console().print(table)


def print_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(readable(name, cell))) for name, cell in zip(columns, row, strict=True)))
    _console().print(table)


def _console() -> Console:
    """stdout; in a pipe there is no edge to fold at, and a folded path could not be copied."""
    return Console() if sys.stdout.isatty() else Console(width=WIDE)


def readable(name: str, value: Any) -> str:
    """Fractions as per cent, times with a unit, the rest short."""
    if value is None:
        return "-"
    if name in ("top1", "top5"):
        return f"{100 * value:.2f} %"
    if name == "seconds":
        return f"{value:.1f} s"
    if name == "parameters":
        return f"{value / 1e6:.2f}M"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
