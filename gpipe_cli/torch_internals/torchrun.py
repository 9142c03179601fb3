"""A process that torchrun started: whether it prints, and where it writes why it failed.

After the end of all processes, torchrun shows what the first one that failed wrote to its error file, so users see
one line however many ranks fail alike. The variables and the file format are torchrun's. torch itself is not
imported, so that a mistyped key is reported without it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

_STARTED, _RANK, _REASON = "TORCHELASTIC_RUN_ID", "RANK", "TORCHELASTIC_ERROR_FILE"
_LATER = 60
"""Seconds. torchrun reports the process that failed first, by timestamps in whole seconds."""


def is_rank() -> bool:
    return _STARTED in os.environ


def follows() -> bool:
    """Whether another process prints for this one."""
    return is_rank() and os.environ.get(_RANK, "0") != "0"


def leave_reason(line: str, *, of_another: bool) -> None:
    """Write the reason to torchrun's error file; of_another: this process failed only because another did."""
    path = os.environ.get(_REASON)
    if not is_rank() or not path:
        return
    when = int(time.time()) + (_LATER if of_another else 0)
    shown = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(when)}}
    Path(path).write_text(json.dumps({"message": shown}), encoding="utf-8")
