"""stdout when its reader has gone (`| head`): that is no error of ours, and must not end a run."""

from __future__ import annotations

import os
import sys


def leave_stdout() -> None:
    """Send whatever else is printed to nowhere; Python's own flush at the end must not fail either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
