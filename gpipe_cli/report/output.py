"""The two streams: a line for people on stderr, and stdout when its reader has gone (`| head`).

The latter is no error of ours, and must not end a run.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from gpipe_cli.report.text import plain
from gpipe_cli.safe_files import open_regular


def leave_stdout() -> None:
    """Send whatever else is printed to nowhere; Python's own flush at the end must not fail either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_streams_to(path: Path, base: Path) -> None:
    """Both streams go to the end of a file, also what is not written by Python; below `base` no link is followed."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, base=base)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def say(line: str) -> None:
    """Something worth a line, now, and no part of the result."""
    with suppress(OSError):  # a disk without room, or nobody who reads it, is no reason to end a run
        sys.stderr.write(f"{plain(line)}\n")
        sys.stderr.flush()
