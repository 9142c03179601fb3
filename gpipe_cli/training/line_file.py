"""A file of lines that training can do without: a disk without room, or a broken one, must not end a run.

Decides what becomes of lines that cannot be written: they wait, up to a limit, and are written when that is possible
again. The file never has a torn line followed by another. Knows nothing of what the lines say, and tells nobody: who
owns the file asks it for `trouble`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import final

from gpipe_cli.safe_files import open_regular, writing

MOST_WAITING = 8 * 2**20
"""Bytes that wait in memory; lines beyond that are lost."""


@final
class LineFile:
    """Text is given in whole lines; a logging.StreamHandler takes it for its stream."""

    def __init__(self, path: Path, base: Path | None = None) -> None:
        """base: the directory below which no link is followed, where it is not that of the file."""
        self.path = path
        self.trouble: OSError | None = None
        """Why lines are waiting; None while none are."""
        self.lost = 0
        """Lines that will never be written."""
        self._waiting = bytearray()
        with writing(path):  # before the first step there is no harm in giving up
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._descriptor = open_regular(path, flags, base=base or path.parent)
            self._whole = os.fstat(self._descriptor).st_size

    def write(self, lines: str) -> None:
        """Add lines to what is in the file, as soon as that takes them."""
        encoded = lines.encode("utf-8", "backslashreplace")
        self.flush()
        if self._waiting and len(self._waiting) + len(encoded) > MOST_WAITING:
            self.lost += encoded.count(b"\n")
        else:
            self._waiting += encoded
        self.flush()

    def flush(self) -> None:
        """Write what waits. A line that went in by half is completed before anything follows it."""
        try:
            while self._waiting:
                written = os.write(self._descriptor, self._waiting)
                complete = self._waiting.rfind(b"\n", 0, written) + 1
                if complete:
                    self._whole = os.fstat(self._descriptor).st_size - (written - complete)
                del self._waiting[:written]
            self.trouble = None
        except OSError as error:
            self.trouble = error

    def sync(self) -> None:
        """On the disk itself, as far as the disk lets us."""
        self.flush()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self.trouble = error

    def close(self) -> None:
        """A last attempt; half a line, if the file ends in one, is taken out of it."""
        self.flush()
        if self._waiting:
            self.lost += self._waiting.count(b"\n")
            self._waiting.clear()
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._whole)
        with suppress(OSError):  # the descriptor is gone whatever the system says of the disk
            os.close(self._descriptor)
