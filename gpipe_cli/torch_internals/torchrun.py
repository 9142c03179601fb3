"""A process as one of those torchrun started: whether it is the one that speaks, and where it says why it failed.

torchrun shows, after the end of all, what the first that failed had written to a file of its own: so one line of
whichever rank is seen, however many fail alike. The variables and the form of the file are torchrun's. torch itself is
not imported: a mistyped word is answered without it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

_STARTED, _RANK, _REASON = "TORCHELASTIC_RUN_ID", "RANK", "TORCHELASTIC_ERROR_FILE"
_LATER = 60
"""Seconds. torchrun blames who failed first, by clocks that count whole seconds."""


def follows() -> bool:
    """Whether another process is the one that speaks."""
    return _STARTED in os.environ and os.environ.get(_RANK, "0") != "0"


def leave_reason(line: str, *, of_another: bool) -> None:
    """For torchrun, where it asks for it; of_another: only because another process has failed."""
    path = os.environ.get(_REASON)
    if _STARTED not in os.environ or not path:
        return
    when = int(time.time()) + (_LATER if of_another else 0)
    shown = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(when)}}
    Path(path).write_text(json.dumps({"message": shown}), encoding="utf-8")
