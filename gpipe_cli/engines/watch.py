"""A thread of the launcher that sees ranks die, freeze or be asked to stop, and acts where torch would wait.

torch's agent gives ranks 30 seconds to end after one has failed, and a rank that waits for a frozen one does not hear
a signal. Here the others are killed soon after a first failure, and all of them when a step takes too long or a rank
is stopped for too long, whatever it was doing. Decides when; who is to blame is decided elsewhere, from what is seen
here.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import final

from gpipe_cli.engines.meeting import NOT_IN_A_STEP, Beats, Meeting

GRACE = 2.0
"""Seconds the others have to notice that a rank has failed, and to say so."""
LOOKS = 0.1
"""Seconds between two looks at beats and requests; deaths are told by the system at once."""
LONGEST = 1.0
"""Seconds between two looks that count. If more have passed this process was stopped itself, as its ranks: Ctrl-Z."""

STOPPED = -1.0
"""In place of a beat, of a rank that is stopped outside of a step."""

Pids = Callable[[], Mapping[int, int]]
"""Process ids by rank; none before the ranks have started."""


@final
class Watch:
    """Use it in a `with`: what it has seen is to be read after it."""

    def __init__(
        self,
        meeting: Meeting,
        ranks: int,
        pids: Pids,
        step_timeout: float | None,
        asked: Callable[[], int | None],
    ) -> None:
        """asked: the number of a signal the launcher was sent."""
        self.deaths: dict[int, float] = {}
        self.killed: set[int] = set()
        """By us."""
        self.late: list[int] = []
        """Ranks that were stopped for too long, or kept a step from ending in time."""
        self.stopped = False
        """Whether those are held by a signal."""
        self._meeting, self._pids, self._asked, self._step_timeout = meeting, pids, asked, step_timeout
        self._beats = Beats(meeting.beats, ranks)
        self._handles: dict[int, int] = {}
        self._of_process: dict[int, int] = {}
        self._looked, self._clock = time.monotonic(), 0.0
        self._unchanged: dict[int, tuple[float, float]] = {}
        """What each rank was seen at, and since when by our clock."""
        self._forwarded = False
        self._kill_at: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpipe-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for handle in self._handles.values():
            os.close(handle)

    def _run(self) -> None:
        while not self._over.is_set():
            if not self._handles and not self._meet_ranks():
                self._over.wait(LOOKS)
                continue
            self._note_deaths()
            self._forward()
            self._look_for_frozen()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_all()
        if self._handles:
            self._note_deaths()

    def _meet_ranks(self) -> bool:
        """A handle stays with its process; a number may be another's when the process has gone."""
        for rank, process in self._pids().items():
            with suppress(ProcessLookupError):  # it has died, and torch has noticed before us
                self._handles[rank] = os.pidfd_open(process)
                self._of_process[rank] = process
        return bool(self._handles)

    def _note_deaths(self) -> None:
        alive = {handle: rank for rank, handle in self._handles.items() if rank not in self.deaths}
        if not alive:
            self._over.wait(LOOKS)
            return
        for handle in select.select(list(alive), [], [], LOOKS)[0]:
            rank = alive[handle]
            self.deaths[rank] = time.monotonic()
            word = self._meeting.last_word(rank)
            if word is None or not word.in_order:
                self._kill_at = self._kill_at or time.monotonic() + GRACE

    def _forward(self) -> None:
        """Once: a second request is not theirs to hear, the launcher ends them then."""
        number = self._asked()
        if number is not None and not self._forwarded:
            self._forwarded = True
            for rank in self._handles:
                self._send(rank, number)

    def _look_for_frozen(self) -> None:
        if self._step_timeout is None or self.late:
            return
        now = time.monotonic()
        self._clock += min(now - self._looked, LONGEST)
        self._looked = now
        beats = self._beats.since()
        held = [rank for rank, process in self._of_process.items() if _is_stopped(process)]
        overdue = [rank for rank in self._of_process if self._is_overdue(rank, beats[rank], rank in held)]
        if not overdue:
            return
        absent = [rank for rank, beat in enumerate(beats) if beat == NOT_IN_A_STEP]
        self.stopped = bool(held)
        self.late = held or absent or list(self._of_process)
        self._kill_all()

    def _is_overdue(self, rank: int, beat: float, stopped: bool) -> bool:
        """Whether it has been stopped, or in one and the same step, for longer than a step may take."""
        assert self._step_timeout is not None
        state = STOPPED if stopped and beat == NOT_IN_A_STEP else beat
        before, since = self._unchanged.get(rank, (NOT_IN_A_STEP, 0.0))
        if state != before:
            since = self._clock
            self._unchanged[rank] = state, since
        return state != NOT_IN_A_STEP and self._clock - since > self._step_timeout

    def _kill_all(self) -> None:
        self._kill_at = None
        for rank in self._handles:
            if rank not in self.deaths:
                self.killed.add(rank)
                self._send(rank, signal.SIGKILL)

    def _send(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handles[rank], number)


def _is_stopped(process: int) -> bool:
    """From the state the system shows, after the name in brackets, which may hold anything."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (FileNotFoundError, ProcessLookupError):
        return False
