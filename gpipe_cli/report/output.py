"""stdout and stderr, replaced so that writing to them never fails.

A reader that has gone (`| head`), a closed terminal, a full disk behind `>` or a stream that was closed from the start
(`2>&-`) is not an error of the run, and must not change its result or its exit code.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import IO, Any, TextIO, final

from gpipe_cli.activity import activity
from gpipe_cli.report.formatting import one_line, printable, whole_words
from gpipe_cli.safe_files import open_regular

STDIN, STDOUT, STDERR = 0, 1, 2
line_begin = ""
"""What each line of status begins with: the number of the job, in a process beside others."""
LOCAL_FLAGS = 3
"""The place of the local modes in what `termios.tcgetattr` returns."""


@final
class _UnfailingFile(io.FileIO):
    """A descriptor whose writes cannot fail: after the first that does, it writes to the null device."""

    def write(self, data: Any, /) -> int:
        try:
            with activity.room_for(self.fileno(), memoryview(data)):
                while (written := super().write(data)) is None:
                    # Another process made the pipe we share non-blocking: wait for room.
                    select([], [self.fileno()], [])
        except OSError as error:
            _redirect_to_null(self.fileno())
            if self.fileno() == STDOUT and error.errno not in (errno.EPIPE, errno.EIO):
                print_status(f"warning: cannot write to stdout: {error.strerror}; the result is lost")
            return memoryview(data).nbytes
        return written


def secure_streams() -> None:
    """Make sure that no write to stdout or stderr fails.

    Call this before opening any file: a new file takes the number of a closed standard descriptor, and would receive
    what is meant for that stream.
    """
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            _redirect_to_null(descriptor)
    sys.stdout, sys.stderr = _unfailing(STDOUT, sys.stdout), _unfailing(STDERR, sys.stderr)


def discard_stdout() -> None:
    """Discard whatever else is printed to stdout."""
    sys.stdout.flush()
    _redirect_to_null(sys.stdout.fileno())


def redirect_streams(path: Path, base: Path) -> None:
    """Append both streams to a file, including what C code and child processes write; follow no link below `base`."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, base=base)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (STDOUT, STDERR):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def print_status(line: str) -> None:
    """Print a line to stderr that is not part of the result."""
    line = f"{line_begin}{one_line(line)}"
    width = terminal_width(sys.stderr)
    sys.stderr.write(f"{line if width is None else whole_words(line, width)}\n")
    sys.stderr.flush()


def terminal_width(stream: TextIO) -> int | None:
    """None if the stream is no terminal, or one that does not know its width."""
    return (os.get_terminal_size(stream.fileno()).columns or None) if stream.isatty() else None


def print_text(text: str) -> None:
    """Print a part of the result at once: as it is, but without what could control a terminal if stdout is one."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@contextmanager
def without_control_echo(stream: IO[str]) -> Iterator[None]:
    """Inside, a terminal does not show a pressed Ctrl-C as ^C, which would break a line that is being drawn."""
    with suppress(OSError, ValueError, termios.error):  # not a terminal
        _set_control_echo(stream.fileno(), False)
    try:
        yield
    finally:
        with suppress(OSError, ValueError, termios.error):
            _set_control_echo(stream.fileno(), True)


def _set_control_echo(descriptor: int, on: bool) -> None:
    # The system stops a background process that changes its terminal, and the shell restores what it needs.
    if os.tcgetpgrp(descriptor) == os.getpgrp():
        attributes = termios.tcgetattr(descriptor)
        flags = attributes[LOCAL_FLAGS]
        attributes[LOCAL_FLAGS] = flags | termios.ECHOCTL if on else flags & ~termios.ECHOCTL
        termios.tcsetattr(descriptor, termios.TCSANOW, attributes)


def _unfailing(descriptor: int, before: TextIO | None) -> TextIO:
    """Replace Python's own stream, which is None if the descriptor was closed."""
    encoding = "utf-8" if before is None else before.encoding
    line_buffering = descriptor == STDERR or os.isatty(descriptor)
    raw = _UnfailingFile(descriptor, "w", closefd=False)
    # backslashreplace: a character that the encoding lacks must not fail either.
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=line_buffering
    )


def _redirect_to_null(descriptor: int) -> None:
    """Open the null device under that number, for child processes as well."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    else:
        os.set_inheritable(descriptor, True)
