"""Read the files of a run directory as untrusted values: bounded in size, and never run.

A missing file is fine. A file that is damaged, too large or not a regular file becomes a problem on the page, and the
rest of the page is made without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from gpipe_cli.safe_files import parse_json, read_regular

MAX_FILE_BYTES = 64 * 2**20
"""A page could not show more."""
MAX_NUMBER = 1e100
"""Sums and differences of such numbers do not overflow."""


@final
class RunFiles:
    """The files that can be read; `problems` lists those that cannot."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.problems: list[str] = []

    def text(self, name: str) -> str:
        path = self._directory / name
        try:
            return read_regular(path, MAX_FILE_BYTES, base=self._directory).decode()
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError:
            self.problems.append(f"{name}: not UTF-8 text; the page leaves it out")
        except OSError as error:
            self.problems.append(f"{name}: cannot be read: {error.strerror or error}")
        return ""

    def json(self, name: str) -> Mapping[str, Any]:
        """The mapping in a JSON file; empty if there is none."""
        content = self.text(name)
        if not content:
            return {}
        parsed = _parse(content)
        if not isinstance(parsed, dict):
            self.problems.append(f"{name}: damaged; the page leaves it out")
            return {}
        return parsed

    def json_lines(self, name: str) -> Iterator[Mapping[str, Any]]:
        damaged = 0
        for line in self.text(name).splitlines():
            parsed = _parse(line)
            if isinstance(parsed, dict):
                yield parsed
            else:
                damaged += 1
        if damaged:
            self.problems.append(f"{name}: {damaged} damaged lines; the page leaves them out")


def _parse(content: str) -> Any:
    try:
        return parse_json(content)
    except ValueError:
        return None


def as_number(value: Any) -> float | None:
    """A number that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) and abs(number) <= MAX_NUMBER else None


def as_int(value: Any, most: int) -> int | None:
    """An integer from 0 to `most`, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_rows(value: Any) -> list[Mapping[str, Any]]:
    """The mappings among the items of a list."""
    return [item for item in as_list(value) if isinstance(item, dict)]
