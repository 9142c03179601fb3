"""metrics.jsonl and the logs: files of whole lines, so that a full or broken disk does not end a run.

A resumed run cuts metrics.jsonl back to the rows its snapshot knows of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, final

from gpipe_cli.errors import RunError
from gpipe_cli.safe_files import open_regular, parse_json, writing
from gpipe_cli.training.loop import Position

MAX_WAITING_BYTES = 8 * 2**20
"""Lines that cannot be written wait in memory up to this size; later ones are lost."""
MAX_ROW_BYTES = 2**20
"""A row of metrics.jsonl has a few hundred."""


@final
class LineFile:
    """A file that takes whole lines and never raises on a write; `trouble` and `lost` tell its owner.

    Lines that the disk refuses wait and are written as soon as it takes them. The file never has a torn line
    followed by another one. A logging.StreamHandler can use it as its stream.
    """

    def __init__(self, path: Path, base: Path | None = None) -> None:
        """base: the directory below which no link is followed; by default that of the file."""
        self.path = path
        self.trouble: OSError | None = None
        """Why lines are waiting; None while none are."""
        self.lost = 0
        """Lines that will never be written."""
        self._waiting = bytearray()
        with writing(path):  # opening may fail: no step has run yet that would be lost
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._descriptor = open_regular(path, flags, base=base or path.parent)
            self._size_of_whole_lines = os.fstat(self._descriptor).st_size

    def write(self, lines: str) -> None:
        encoded = lines.encode("utf-8", "backslashreplace")
        self.flush()
        if self._waiting and len(self._waiting) + len(encoded) > MAX_WAITING_BYTES:
            self.lost += encoded.count(b"\n")
        else:
            self._waiting += encoded
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines."""
        try:
            while self._waiting:
                # A full disk may take a part of a line. The rest stays first in the queue, so that nothing else can
                # follow half a line, and close() can cut the file back to its last whole one.
                written = os.write(self._descriptor, self._waiting)
                complete = self._waiting.rfind(b"\n", 0, written) + 1
                if complete:
                    self._size_of_whole_lines = os.fstat(self._descriptor).st_size - (written - complete)
                del self._waiting[:written]
            self.trouble = None
        except OSError as error:
            self.trouble = error

    def sync(self) -> None:
        """Flush, and ask the system to put the lines on the disk itself."""
        self.flush()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self.trouble = error

    def close(self) -> None:
        """Try a last time; if that fails, cut half a line off the end of the file."""
        self.flush()
        if self._waiting:
            self.lost += self._waiting.count(b"\n")
            self._waiting.clear()
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size_of_whole_lines)
        with suppress(OSError):  # close() frees the descriptor even where it reports a disk error
            os.close(self._descriptor)


@final
class MetricsFile:
    """metrics.jsonl: one JSON object per line, handed to the system as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self.file = LineFile(path)

    def write(self, row: Mapping[str, Any]) -> None:
        self.file.write(f"{json.dumps(row)}\n")

    def sync(self) -> None:
        """Call it before a snapshot is saved: after a power cut no snapshot may know rows that the file lacks."""
        self.file.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def metrics_length_at(path: Path, position: Position) -> int:
    """How many bytes of metrics.jsonl are rows up to `position`; changes nothing.

    A power cut leaves half a line or zeros at the end of the file. For any other line that is not a row, raise
    RunError before a caller cuts rows off.
    """
    try:
        descriptor = open_regular(path, base=path.parent)
    except FileNotFoundError:
        return 0
    length = end = torn = number = 0
    with os.fdopen(descriptor, "rb") as file:
        while line := file.readline(MAX_ROW_BYTES + 1):
            number, end = number + 1, end + len(line)
            if len(line) <= MAX_ROW_BYTES and (not line.endswith(b"\n") or b"\0" in line):
                torn = torn or number
                continue
            try:
                if not _is_row_until(line, position):
                    break
                if torn:
                    raise ValueError("it is cut short, and others follow it")
            except ValueError as error:
                raise RunError(
                    f"{path}: line {torn or number} is not a row of metrics: {error}; repair it, or remove the file "
                    "to resume without the earlier rows"
                ) from error
            length = end
    return length


def _is_row_until(line: bytes, position: Position) -> bool:
    if len(line) > MAX_ROW_BYTES:
        raise ValueError(f"it has more than {MAX_ROW_BYTES:,} bytes")
    match parse_json(line):
        case {"step": int(step), "split": str(split)} if type(step) is int and step >= 0:
            return step < position.step or (step == position.step and (position.evaluated or split != "eval"))
    raise ValueError("it has no step and split")


def truncate_metrics(path: Path, length: int) -> None:
    with suppress(FileNotFoundError):
        descriptor = open_regular(path, os.O_RDWR, base=path.parent)
        try:
            os.ftruncate(descriptor, length)
        finally:
            os.close(descriptor)
