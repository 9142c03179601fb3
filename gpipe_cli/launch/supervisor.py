"""The launcher's thread that notices ranks that die, freeze or must stop, and acts where torch would wait.

After a failure torch's agent gives the other ranks 30 seconds to end, and a rank that waits for a frozen peer cannot
handle a signal. The supervisor kills the others soon after the first failure, and all ranks when a step takes too long
or a rank stays suspended for too long. `root_cause` decides which rank to name, from what the supervisor recorded.
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

from gpipe_cli.launch.heartbeat import NOT_IN_STEP, Heartbeats
from gpipe_cli.launch.rank_files import RankFiles

GRACE_SECONDS = 2.0
"""How long the other ranks have to notice a failure and write their exit reports."""
POLL_SECONDS = 0.1
"""Between two looks at heartbeats and signals; the kernel reports deaths at once."""
LONGEST_TICK = 1.0
"""The most seconds one poll adds to the clock: after a longer gap this process itself was suspended (Ctrl-Z)."""
SUSPENDED = -1.0
"""Takes the place of the heartbeat of a rank that is suspended outside a step."""


@final
class Supervisor:
    """Use it in a `with` statement, and read its attributes afterwards."""

    def __init__(
        self,
        files: RankFiles,
        ranks: int,
        process_ids: Callable[[], Mapping[int, int]],
        step_timeout: float | None,
        stop_signal: Callable[[], int | None],
    ) -> None:
        """process_ids: by rank, empty before the ranks have started; stop_signal: the signal the launcher got."""
        self.deaths: dict[int, float] = {}
        """The time of each rank's death, by the monotonic clock."""
        self.killed: set[int] = set()
        """The ranks that this supervisor killed."""
        self.stalled: list[int] = []
        """The ranks that were suspended for too long, or kept a step from ending in time."""
        self.suspended = False
        """Whether a signal holds the stalled ranks."""
        self._files, self._process_ids, self._stop_signal = files, process_ids, stop_signal
        self._step_timeout = step_timeout
        self._heartbeats = Heartbeats(files.heartbeats, ranks)
        self._pidfds: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._polled_at, self._clock = time.monotonic(), 0.0
        self._unchanged: dict[int, tuple[float, float]] = {}
        """Each rank's last heartbeat, and since when by `_clock` it has not changed."""
        self._forwarded = False
        self._kill_at: float | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpipe-supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    def _run(self) -> None:
        while not self._finished.is_set():
            if not self._pidfds and not self._open_ranks():
                self._finished.wait(POLL_SECONDS)
                continue
            self._record_deaths()
            self._forward_stop_signal()
            self._check_heartbeats()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_all()
        # Once more: the agent may have returned before this thread saw the last deaths.
        if self._pidfds:
            self._record_deaths()

    def _open_ranks(self) -> bool:
        # A pidfd stays with its process, while the kernel may give the number of a dead process to another.
        for rank, process_id in self._process_ids().items():
            with suppress(ProcessLookupError):  # it has died, and torch has already reaped it
                self._pidfds[rank] = os.pidfd_open(process_id)
                self._pids[rank] = process_id
        return bool(self._pidfds)

    def _record_deaths(self) -> None:
        alive = {pidfd: rank for rank, pidfd in self._pidfds.items() if rank not in self.deaths}
        if not alive:
            self._finished.wait(POLL_SECONDS)
            return
        for pidfd in select.select(list(alive), [], [], POLL_SECONDS)[0]:
            rank = alive[pidfd]
            self.deaths[rank] = time.monotonic()
            report = self._files.read_exit_report(rank)
            if report is None or not report.is_clean:
                # Only the first failure sets the time: those that follow are its consequences.
                self._kill_at = self._kill_at or time.monotonic() + GRACE_SECONDS

    def _forward_stop_signal(self) -> None:
        """Only once: at a second request the launcher ends the ranks itself."""
        number = self._stop_signal()
        if number is not None and not self._forwarded:
            self._forwarded = True
            for rank in self._pidfds:
                self._send(rank, number)

    def _check_heartbeats(self) -> None:
        if self._step_timeout is None or self.stalled:
            return
        now = time.monotonic()
        self._clock += min(now - self._polled_at, LONGEST_TICK)
        self._polled_at = now
        heartbeats = self._heartbeats.read()
        suspended = [rank for rank, process_id in self._pids.items() if _is_suspended(process_id)]
        # A list, not a generator: every rank's heartbeat has to be recorded, not only those up to the first overdue.
        overdue = [rank for rank in self._pids if self._is_overdue(rank, heartbeats[rank], rank in suspended)]
        if not overdue:
            return
        # Ranks inside a step wait for their peers: a rank that has not entered it keeps the others waiting.
        outside_step = [rank for rank, beat in enumerate(heartbeats) if beat == NOT_IN_STEP]
        self.suspended = bool(suspended)
        self.stalled = suspended or outside_step or list(self._pids)
        self._kill_all()

    def _is_overdue(self, rank: int, heartbeat: float, suspended: bool) -> bool:
        """Whether the rank has been suspended, or in the same step, for longer than `step_timeout`."""
        assert self._step_timeout is not None, "the caller has checked"
        state = SUSPENDED if suspended and heartbeat == NOT_IN_STEP else heartbeat
        # Measured by our own clock from the last change, so that time in which this machine was suspended does not
        # count.
        before, since = self._unchanged.get(rank, (NOT_IN_STEP, 0.0))
        if state != before:
            since = self._clock
            self._unchanged[rank] = state, since
        return state != NOT_IN_STEP and self._clock - since > self._step_timeout

    def _kill_all(self) -> None:
        self._kill_at = None
        for rank in self._pidfds:
            if rank not in self.deaths:
                self.killed.add(rank)
                self._send(rank, signal.SIGKILL)

    def _send(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfds[rank], number)


def _is_suspended(process_id: int) -> bool:
    # The state follows the process name, which stands in brackets and may itself contain brackets and spaces.
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (FileNotFoundError, ProcessLookupError):
        return False
