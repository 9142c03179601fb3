"""A rank that does nothing but come to its meeting and misbehave: `python acting_rank.py <folder> <part>`.

It imports no torch, so that a test of the launcher takes moments.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from gpipe_cli.engines.meeting import Beats, LastWord, Meeting

ERRORS = {"finds nan": (5, "the loss is nan"), "raises": (1, "ValueError: broken")}
"""What rank 1 says; rank 0 only loses its peer."""


def main(folder: str, part: str) -> None:
    meeting, rank = Meeting(Path(folder)), int(os.environ["RANK"])
    ready = Path(folder) / f"ready-{rank}"

    def end(code: int, text: str = "", *, blames_a_peer: bool = False) -> NoReturn:
        summary = {"loss": 0.5} if rank == 0 else None
        meeting.say_last(rank, LastWord(code, text, blames_a_peer, time.monotonic(), summary))
        os._exit(code)

    def leave(*_: object) -> NoReturn:
        end(0, "stopped")

    if part == "heeds a request":
        signal.signal(signal.SIGUSR1, leave)
    Beats(meeting.beats, 2).begin(rank)
    ready.touch()
    if part == "ends well":
        end(0)
    if rank == 1 and part in ("is killed", "is stopped"):
        os.kill(os.getpid(), signal.SIGKILL if part == "is killed" else signal.SIGSTOP)
    if rank == 1 and part == "ends without a word":
        os._exit(0)
    if part in ERRORS:
        if rank == 1:
            end(*ERRORS[part])
        while meeting.last_word(1) is None:  # else torch's agent may end rank 1 before it has spoken
            os.sched_yield()
        end(7, "connection closed", blames_a_peer=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
