"""Values and untrusted text for people to read. Facts on disk and in JSON stay unrounded."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from gpipe_cli.errors import GpipeError

PERCENTAGES = ("top1", "top5", "accuracy", "mean_iou", "share", "bubble", "busy", "recompute")
COUNT_UNITS = (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3))
BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
LEAST_TEXT = 30
"""Text folded to fewer characters is hard to read."""
INVISIBLE = ("Cc", "Cf", "Cs", "Co")
"""Unicode categories: control, format, surrogate, private use. They can move a cursor or reverse text."""
_LINE_BREAK = re.compile(r" *[\t-\r\x1c-\x1f\x85\u2028\u2029]\s*")
"""White space with a line break or a tab in it."""
_WORD = re.compile(r"\s*(?:'[^']*'\S*|\S+)")
"""With the spaces before it. What is quoted counts as one word: its spaces may be those of a path."""


def format_value(name: str, value: Any) -> str:
    """Format a fact by its name: fractions as per cent, times and sizes with a unit, the rest with few digits."""
    if value is None:
        return "-"
    if isinstance(value, str):  # text as it is, except for a count that was read from a file
        return format_value(name, int(value)) if name == "parameters" and value.isdecimal() else value
    if name.endswith(PERCENTAGES):
        return f"{100 * value:.2f} %"
    if name == "seconds":
        return f"{value:.1f} s"
    if name.endswith("_ms"):
        return f"{value:.3f}"
    if name.endswith(("parameters", "flops")):
        return _with_unit(value, COUNT_UNITS)
    if name.endswith("bytes"):
        return _with_unit(value, BYTE_UNITS, " ") + ("" if value >= BYTE_UNITS[-1][1] else " B")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _with_unit(value: float, units: Sequence[tuple[str, int]], space: str = "") -> str:
    """11181642 becomes 11.18M."""
    for unit, size in units:
        if value >= size:
            return f"{value / size:.2f}{space}{unit}"
    return str(value)


def one_line(text: str) -> str:
    """Remove invisible characters and line breaks, so that no name can move the cursor of a terminal."""
    visible = (
        character
        for character in text
        if character.isspace() or unicodedata.category(character) not in INVISIBLE
    )
    # Other spaces stay as they are: the line may be a command that names a file.
    return _LINE_BREAK.sub(" ", "".join(visible)).strip()


def whole_words(line: str, width: int, indent: int = 0) -> str:
    """Fill up the rows of a terminal with spaces, so that it cuts no word: a line without breaks can be copied.

    indent: that of all rows but the first, where it leaves enough room.
    """
    from rich.cells import cell_len  # help, lists and pipes need no rich

    indent = indent if width - indent >= LEAST_TEXT else min(2, width // 2)
    rows, row = "", ""
    for word in _WORD.findall(line):
        if row and cell_len(row + word) > width:
            rows += row + " " * (width - cell_len(row))
            row, word = " " * indent, word.lstrip()
        row += word
        while cell_len(row) > width:  # the terminal cuts what is longer than a row
            rows, row = rows + row[:width], row[width:]
    return rows + row


def hidden_character(text: str) -> str | None:
    """The first character that `one_line` removes or changes: a line that shows such a name cannot be used again."""
    return next((char for char in text if char != " " and one_line(f"a{char}a") != f"a{char}a"), None)


def no_hidden(character: str) -> str:
    return f"contains the character {character!a}, which a terminal does not show; remove it"


def printable(text: str) -> str:
    """Remove invisible characters but keep lines and their indentation, for an HTML page."""
    return "".join(
        character
        for character in text
        if character in "\n\t" or unicodedata.category(character) not in INVISIBLE
    )


def describe(error: BaseException) -> str:
    """The message of a GpipeError, or type and message of any other exception, followed by its notes."""
    text = one_line(str(error))
    if not isinstance(error, GpipeError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    notes = "".join(f" ({one_line(note)})" for note in getattr(error, "__notes__", ()))
    return f"{text}{notes}"
