"""Markdown as the made pages need it: tables whose cells may hold anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["MADE", "code", "table"]

MADE = "<!-- Made by `python -m make_docs`: change the code it speaks of, not this page. -->"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def code(text: str) -> str:
    """As typed; nothing stays nothing."""
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    """Between backticks all is text already, except what ends a cell."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")
