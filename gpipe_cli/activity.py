"""What a command is doing, on stderr, until there is something else to see: `importing torch, 1.2 s`.

On a terminal it is one line that is redrawn, and that makes room for whatever this process prints. Elsewhere a line is
printed from time to time. A library that somebody imports shows nothing: only a command calls `start`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from textwrap import shorten
from typing import final

STDOUT, STDERR = 1, 2
FIRST_FRAME, FRAME = 0.15, 0.1
"""Seconds before the first line on a terminal, so that quick commands show none, and between two of them."""
FIRST_LINE, LINE, LINE_SHARE = 3.0, 5.0, 0.1
"""Seconds before the first line elsewhere, and between two of them; at least this share of what has passed."""
BRIEF = 0.5
"""What takes no longer, in seconds, gets no line elsewhere."""
_ERASE = "\r\x1b[2K"


def on_terminal() -> bool:
    """Whether stderr is a terminal whose lines can be redrawn."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@final
class Activity:
    """What this process is doing. A thread redraws it, as far as imports of C extensions let it run."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._active = threading.Event()
        self._is_shown = self._is_drawn = False
        self._is_line_whole = True
        self._text: Callable[[], str] = str
        self._started = self._began = self._due = 0.0

    def start(self, text: str) -> None:
        """Show what this process does from now on: it has stderr for itself."""
        self._is_shown, self._started = True, time.monotonic()
        self._due = self._started + (FIRST_FRAME if on_terminal() else FIRST_LINE)
        # A forked child has no such thread, and perhaps a lock that nobody will release.
        os.register_at_fork(after_in_child=self.__init__)
        threading.Thread(target=self._redraw, name="gpipe-activity", daemon=True).start()
        self.now(text)

    def now(self, text: str | Callable[[], str]) -> None:
        """Show this with the time that it takes; a function is called again for each line."""
        with self._lock:
            self._text = text if callable(text) else lambda: text
            self._began = time.monotonic()
            if self._is_shown:
                self._active.set()
                self._draw()

    def end(self) -> None:
        """Show nothing until the next call of `now`."""
        with self._lock:
            self._active.clear()
            self._erase()

    @contextmanager
    def room_for(self, descriptor: int, data: memoryview) -> Iterator[None]:
        """Inside, the data is written to stdout, which ends what was in progress, or as a message to stderr."""
        with self._lock:
            if descriptor == STDOUT:
                self.end()
            self._erase()
            yield
            self._is_line_whole = bytes(data[-1:]) == b"\n"

    def _redraw(self) -> None:
        while True:
            self._active.wait()
            time.sleep(FRAME)
            with self._lock:
                if self._active.is_set():
                    self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if now < self._due or not self._is_line_whole:
            return
        if now - self._began < BRIEF and not on_terminal():
            return
        text, passed = self._text(), f", {now - self._began:.1f} s"
        with suppress(OSError):  # what cannot be written, nobody misses
            if not on_terminal():
                self._due = now + max(LINE, LINE_SHARE * (now - self._started))
                os.write(STDERR, f"{text}{passed}\n".encode())
            elif os.tcgetpgrp(STDERR) == os.getpgrp():  # the terminal of a background job belongs to another
                room = (os.get_terminal_size(STDERR).columns or 80) - 1 - len(passed)
                text = shorten(text, max(room, 3), placeholder="...")
                self._is_drawn = True
                # The cursor rests at the start, where ^C is echoed and C code prints.
                os.write(STDERR, f"{_ERASE}{text}{passed}\r".encode())

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            with suppress(OSError):
                os.write(STDERR, _ERASE.encode())


activity = Activity()
"""A process has one stderr."""
