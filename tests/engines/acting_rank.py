"""A rank that does nothing but come to its meeting and misbehave: `python acting_rank.py <folder> <part>`.

It imports no torch, so that a test of the launcher takes moments.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gpipe_cli.engines.meeting import Beats, LastWord, Meeting

ERRORS = {"finds nan": (5, "the loss is nan"), "raises": (1, "ValueError: broken")}
"""What rank 1 says; rank 0 only loses its peer."""


def until(happened: Callable[[], bool]) -> None:
    while not happened():
        os.sched_yield()


def is_stopped(process: int) -> bool:
    return " T " in Path(f"/proc/{process}/stat").read_text()


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
    ready.write_text(str(os.getpid()))
    # Else, on a busy machine, one would be in its step for longer than is allowed before the other has started.
    other = Path(folder) / f"ready-{1 - rank}"
    until(lambda: other.exists() and other.read_text() != "")
    beats = Beats(meeting.beats, 2)
    if part == "is stopped between steps":
        if rank == 1:
            beats.begin(rank)
            beats.end(rank)
            os.kill(os.getpid(), signal.SIGSTOP)
        until(lambda: is_stopped(int(other.read_text())))
    elif rank == 1 and part == "is stopped while it starts":
        os.kill(os.getpid(), signal.SIGSTOP)
    if part != "is stopped while it starts":
        beats.begin(rank)
    if part == "ends well":
        end(0)
    if rank == 1 and part in ("is killed", "is stopped"):
        os.kill(os.getpid(), signal.SIGKILL if part == "is killed" else signal.SIGSTOP)
    if rank == 1 and part == "ends without a word":
        os._exit(0)
    if part in ERRORS:
        if rank == 1:
            end(*ERRORS[part])
        # Else torch's agent may end rank 1 before it has spoken.
        until(lambda: meeting.last_word(1) is not None)
        end(7, "connection closed", blames_a_peer=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
