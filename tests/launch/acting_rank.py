"""Ranks that do nothing but misbehave in a given way.

They import no torch, so that a test of the launcher takes moments.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from gpipe_cli.launch.rank_files import ExitReport, Heartbeats, RankFiles

ERRORS = {"finds nan": (5, "the loss is nan"), "raises": (1, "ValueError: broken")}
"""What rank 1 reports; rank 0 only loses its peer."""


def until(happened: Callable[[], bool]) -> None:
    while not happened():
        os.sched_yield()


def is_stopped(process: int) -> bool:
    return " T " in Path(f"/proc/{process}/stat").read_text()


def main(folder: str, part: str) -> NoReturn:
    files, rank = RankFiles(Path(folder)), int(os.environ["RANK"])
    ready = Path(folder) / f"ready-{rank}"

    def end(code: int, text: str = "", *, caused_by_peer: bool = False) -> NoReturn:
        summary = {"loss": 0.5} if rank == 0 else None
        files.write_exit_report(rank, ExitReport(code, text, caused_by_peer, time.monotonic(), summary))
        os._exit(code)

    def leave(*_: object) -> NoReturn:
        end(0, "stopped")

    step = ExitStack()
    if part == "obeys a signal":
        signal.signal(signal.SIGUSR1, leave)
    ready.write_text(str(os.getpid()))
    # Else, on a busy machine, one would be in its step for longer than is allowed before the other has started.
    other = Path(folder) / f"ready-{1 - rank}"
    until(lambda: other.exists() and other.read_text() != "")
    heartbeats = Heartbeats(files.heartbeats, 2)
    if part == "is stopped between steps":
        if rank == 1:
            with heartbeats.in_step(rank):
                pass
            os.kill(os.getpid(), signal.SIGSTOP)
        until(lambda: is_stopped(int(other.read_text())))
    elif rank == 1 and part == "is stopped while it starts":
        os.kill(os.getpid(), signal.SIGSTOP)
    if part != "is stopped while it starts":
        step.enter_context(heartbeats.in_step(rank))  # which the process never leaves
    if part == "ends well":
        end(0)
    if rank == 1 and part in ("is killed", "is stopped"):
        os.kill(os.getpid(), signal.SIGKILL if part == "is killed" else signal.SIGSTOP)
    if rank == 1 and part == "exits without a report":
        os._exit(0)
    if part in ERRORS:
        if rank == 1:
            end(*ERRORS[part])
        # Else the launcher might end rank 1 before it has written its report.
        until(lambda: files.read_exit_report(1) is not None)
        end(7, "connection closed", caused_by_peer=True)
    while True:
        signal.pause()
