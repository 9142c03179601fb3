"""Files of a run directory as plain values: bounded in size, nothing in them is trusted or run.

A file that is not there is no news. One that is damaged, too large or not what its name says is noted, and the
rest of the page is made without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from gpipe_cli.safe_files import parse_json, read_regular

__all__ = ["Files", "mapping", "number", "rows", "text", "whole"]

MOST_BYTES = 64 * 2**20
"""Beyond this no page could show it."""
LARGEST = 1e100
"""Sums and differences of such numbers are numbers still."""


@final
class Files:
    """What can be read of a directory, and in `notes` what cannot."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.notes: list[str] = []

    def text(self, name: str) -> str:
        path = self._directory / name
        try:
            return read_regular(path, MOST_BYTES, base=self._directory).decode()
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError:
            self.notes.append(f"{name}: is no text")
        except OSError as error:
            self.notes.append(f"{name}: cannot be read: {error.strerror or error}")
        return ""

    def json(self, name: str) -> Mapping[str, Any]:
        """The mapping in a file; empty where there is none."""
        content = self.text(name)
        if not content:
            return {}
        found = _parsed(content)
        if not isinstance(found, dict):
            self.notes.append(f"{name}: is damaged, and left out")
            return {}
        return found

    def json_lines(self, name: str) -> Iterator[Mapping[str, Any]]:
        damaged = 0
        for line in self.text(name).splitlines():
            found = _parsed(line)
            if isinstance(found, dict):
                yield found
            else:
                damaged += 1
        if damaged:
            self.notes.append(f"{name}: {damaged} damaged lines are left out")


def _parsed(content: str) -> Any:
    try:
        return parse_json(content)
    except ValueError:
        return None


def number(value: Any) -> float | None:
    """A number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # of a whole number with hundreds of digits
        return None
    return found if math.isfinite(found) and abs(found) <= LARGEST else None


def whole(value: Any, most: int) -> int | None:
    """A whole number from 0 up to `most`, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[Mapping[str, Any]]:
    """The mappings among the items of a list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
