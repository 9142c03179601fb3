"""Measured numbers kept in files, so that a run need not measure them again.

One JSON file per key, put in place whole. A file is data from outside: whatever does not fit to the letter is left
alone and said, and taken as not there. A folder that cannot be written costs the shelf, not the run. Knows nothing of
what the numbers mean.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

__all__ = ["Found", "Shelf"]

FORMAT = 3
"""Files of format 2 do not tell the load of the machine; like those of any other format they are ignored."""
LARGEST = 2**24
"""Bytes; ten thousand layers take one."""

Key = Mapping[str, Any]
Numbers = list[list[float]]


class Found(NamedTuple):
    numbers: Numbers
    measured: str
    """When."""
    load: float | None
    """Of the machine when the measurement began, per core; None where the system does not tell it."""

    def __str__(self) -> str:
        return self.measured if self.load is None else f"{self.measured} (load {self.load:.1f} per core)"


@final
class Shelf:
    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        """Without a folder nothing is kept."""
        self._folder, self._say = folder, say

    def find(self, key: Key, rows: int, columns: int, seconds: float) -> Found | None:
        """So many rows of numbers, if they were measured for as long or longer."""
        if self._folder is None:
            return None
        path = self._path(self._folder, key)
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError(f"it is larger than {LARGEST} bytes")
            document = json.loads(path.read_text(encoding="utf-8"))
            found = _checked(document, key, rows, columns)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._say(f"{path} is no measurement and is ignored: {error}")
            return None
        return found if document["seconds"] >= seconds else None

    def keep(self, key: Key, seconds: float, load: float | None, numbers: Sequence[Sequence[float]]) -> None:
        if self._folder is None:
            return
        document = {
            "format": FORMAT,
            "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
            "seconds": seconds,
            "load": load,
            "key": key,
            "numbers": numbers,
        }
        path = self._path(self._folder, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another run may read or write the same file now: it sees the old one or the new one, whole.
            with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
                json.dump(document, file)
            Path(file.name).replace(path)
        except OSError as error:
            self._say(f"what was measured cannot be kept for the next run: {error}")

    @staticmethod
    def _path(folder: Path, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        return folder / f"{digest}.json"


def _checked(document: Any, key: Key, rows: int, columns: int) -> Found:
    """ValueError for whatever a shelf would not have written."""
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("key") != key:
        raise ValueError("it is of another format or of another model")
    seconds, measured, numbers = (document.get(name) for name in ("seconds", "measured", "numbers"))
    if not _is_time(seconds) or not isinstance(measured, str) or len(measured) > 40:
        raise ValueError("it does not say when and how long was measured")
    load = document.get("load")
    if load is not None and not _is_time(load):
        raise ValueError("it does not say how busy the machine was")
    if not isinstance(numbers, list) or len(numbers) != rows:
        raise ValueError(f"it does not have {rows} rows")
    for row in numbers:
        if not isinstance(row, list) or len(row) != columns or not all(map(_is_time, row)):
            raise ValueError(f"{str(row)[:40]} are no times")
    return Found([list(map(float, row)) for row in numbers], measured, load)


def _is_time(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )
