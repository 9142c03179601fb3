"""The two streams: a line for people on stderr, and stdout when its reader has gone (`| head`).

The latter is no error of ours, and must not end a run.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from gpipe_cli.report.text import plain


def leave_stdout() -> None:
    """Send whatever else is printed to nowhere; Python's own flush at the end must not fail either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(line: str) -> None:
    """Something worth a line, now, and no part of the result."""
    with suppress(OSError):  # a disk without room, or nobody who reads it, is no reason to end a run
        sys.stderr.write(f"{plain(line)}\n")
        sys.stderr.flush()
