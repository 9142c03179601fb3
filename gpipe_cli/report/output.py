"""The two streams: a line for people on stderr, and both made so that writing to them never fails.

A reader that went away (`| head`), a terminal that was closed, a full disk behind `>` or a stream that was closed from
the start (`2>&-`) is no error of a run, and must not change its result or its exit code.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from select import select
from typing import Any, TextIO, final

from gpipe_cli.report.text import plain
from gpipe_cli.safe_files import open_regular

STDIN, STDOUT, STDERR = 0, 1, 2


@final
class _Lossy(io.FileIO):
    """A descriptor whose writes cannot fail: after the first that does, what it is given goes nowhere."""

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # of a pipe that somebody else made non-blocking
                select([], [self.fileno()], [])
        except OSError as error:
            _discard(self.fileno())
            if self.fileno() == STDOUT and error.errno not in (errno.EPIPE, errno.EIO):
                say(f"warning: stdout cannot be written: {error.strerror}; what was printed there is lost")
            return memoryview(data).nbytes
        return written


def secure_streams() -> None:
    """Make both streams such that no write to them fails; to be called before a file can take a closed one's number."""
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            _discard(descriptor)
    sys.stdout, sys.stderr = _lossy(STDOUT, sys.stdout), _lossy(STDERR, sys.stderr)


def discard_stdout() -> None:
    """Send whatever else is printed there to nowhere."""
    sys.stdout.flush()
    _discard(sys.stdout.fileno())


def write_streams_to(path: Path, base: Path) -> None:
    """Both streams go to the end of a file, also what is not written by Python; below `base` no link is followed."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, base=base)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (STDOUT, STDERR):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def say(line: str) -> None:
    """Something worth a line, now, and no part of the result."""
    sys.stderr.write(f"{plain(line)}\n")
    sys.stderr.flush()


def _lossy(descriptor: int, before: TextIO | None) -> TextIO:
    """The stream in place of Python's own, which is None where the descriptor was closed."""
    # A character the stream cannot write must not fail either.
    encoding = "utf-8" if before is None else before.encoding
    at_once = descriptor == STDERR or os.isatty(descriptor)
    raw = _Lossy(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=at_once
    )


def _discard(descriptor: int) -> None:
    """Open the null device in its place, for processes that are started later as well."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    else:
        os.set_inheritable(descriptor, True)
