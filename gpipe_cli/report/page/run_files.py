"""Read the files of a run directory as untrusted values: bounded in size, and never run.

A missing file is fine. A file that is damaged, too large or not a regular file becomes a problem on the page, and the
rest of the page is made without it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from gpipe_cli.safe_files import UnsafeFile, open_regular, parse_json, read_regular

MAX_FILE_BYTES = 64 * 2**20
"""A page could not show more."""
MAX_LINES_BYTES = 4 * 2**30
"""Ten million rows of metrics, which take a minute or two to read."""
MAX_LINE_BYTES = 2**20
"""A row of metrics has a few hundred."""
MAX_NUMBER = 1e100
"""Sums and differences of such numbers do not overflow."""
MONITOR = re.compile(r"^snapshot:\n(?:  .*\n)*?  monitor: (\w+)$", re.MULTILINE)
"""In a config.yaml as gpipe writes it. Parsing the YAML of hundreds of runs would take seconds."""


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
        parsed = parse_or_none(content)
        if not isinstance(parsed, dict):
            self.problems.append(f"{name}: damaged; the page leaves it out")
            return {}
        return parsed

    def json_lines(self, name: str) -> Iterator[Mapping[str, Any]]:
        """The mappings in a file, line by line, so that the file may be larger than memory."""
        path, damaged = self._directory / name, 0
        try:
            with os.fdopen(open_regular(path, base=self._directory), "rb") as file:
                left = os.fstat(file.fileno()).st_size  # what a run appends meanwhile is left out
                if left > MAX_LINES_BYTES:
                    raise UnsafeFile(f"has {left:,} bytes; gpipe reads at most {MAX_LINES_BYTES:,}")
                while left > 0 and (line := file.readline(MAX_LINE_BYTES)):
                    left -= len(line)
                    parsed = _parse_line(line)
                    if isinstance(parsed, dict):
                        yield parsed
                    else:
                        damaged += 1
        except FileNotFoundError:
            return
        except OSError as error:
            self.problems.append(f"{name}: cannot be read: {error.strerror or error}")
        if damaged:
            self.problems.append(f"{name}: {damaged} damaged lines; the page leaves them out")


def parse_or_none(content: str | bytes) -> Any:
    """The value of a JSON text; None if it is damaged."""
    try:
        return parse_json(content)
    except ValueError:
        return None


def _parse_line(line: bytes) -> Any:
    """As `parse_or_none`, for one of perhaps millions of lines: the caller checks the size of a number that it uses."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def as_number(value: Any) -> float | None:
    """A number that can be drawn, else None."""
    if type(value) is float:  # nearly all numbers of a long metrics.jsonl
        return value if -MAX_NUMBER <= value <= MAX_NUMBER else None
    if type(value) is not int:
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if abs(number) <= MAX_NUMBER else None


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


def watched_metric(config: str) -> str:
    """The metric that decides which evaluation of a run is best; config: the text of its config.yaml."""
    monitor = MONITOR.search(config)
    return "loss" if monitor is None or monitor[1] == "null" else monitor[1]
