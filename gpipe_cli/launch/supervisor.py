"""The launcher's thread that notices ranks that die, freeze or must stop, and acts where torch would wait.

A rank that waits for a dead or frozen peer cannot handle a signal. The supervisor kills the others soon after the
first failure, and all ranks when a step takes too long or a rank stays suspended for too long. `root_cause` decides
which rank to name, from what the supervisor recorded.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import final

from gpipe_cli.launch.heartbeat import Heartbeats
from gpipe_cli.launch.rank_files import RankFiles
from gpipe_cli.launch.rank_states import Stall, StallDetector, is_suspended
from gpipe_cli.process_lifetime import AwakeClock

GRACE_SECONDS = 2.0
"""How long the other ranks have to notice a failure and write their exit reports."""
POLL_SECONDS = 0.1
"""Between two looks at heartbeats and signals; the kernel reports deaths at once."""


@final
class Supervisor:
    """Use it in a `with` statement, and read its attributes afterwards."""

    def __init__(
        self,
        files: RankFiles,
        process_ids: Mapping[int, int],
        step_timeout: float | None,
        stop_signal: Callable[[], int | None],
        all_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """process_ids: by rank; nobody may have reaped them yet. stop_signal: the signal the launcher got.
        all_ended: called from time to time once no rank is left, until this supervisor ends.
        """
        self.deaths: dict[int, float] = {}
        """The time of each rank's death, by the monotonic clock."""
        self.killed: set[int] = set()
        """The ranks that this supervisor killed."""
        self.stall: Stall | None = None
        """Why the supervisor killed all ranks, if it did."""
        self._files, self._process_ids = files, process_ids
        self._stop_signal, self._all_ended = stop_signal, all_ended
        self._stalls = None if step_timeout is None else StallDetector(step_timeout)
        self._heartbeats = Heartbeats(files.heartbeats, len(process_ids))
        self._pidfds: dict[int, int] = {}
        self._clock = AwakeClock()
        self._forwarded = False
        self._kill_at: float | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpipe-supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        self._open_ranks()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    def end_ranks(self) -> None:
        """Kill all ranks and wait until they are gone."""
        self._kill_all()
        for pidfd in self._pidfds.values():
            select.select([pidfd], [], [])

    def _run(self) -> None:
        while not self._finished.is_set():
            self._record_deaths()
            self._forward_stop_signal()
            self._check_heartbeats()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_all()
        # Once more: the launcher may have learned of the last deaths before this thread did.
        self._record_deaths()

    def _open_ranks(self) -> None:
        # A pidfd stays with its process, while the kernel may give the number of a dead process to another.
        for rank, process_id in self._process_ids.items():
            with suppress(ProcessLookupError):  # its server was killed, and it with its server
                self._pidfds[rank] = os.pidfd_open(process_id)

    def _record_deaths(self) -> None:
        alive = {pidfd: rank for rank, pidfd in self._pidfds.items() if rank not in self.deaths}
        if not alive:
            self._all_ended()
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
        if self._stalls is None or self.stall is not None:
            return
        heartbeats = dict(enumerate(self._heartbeats.read()))
        suspended = [rank for rank, process_id in self._process_ids.items() if is_suspended(process_id)]
        self.stall = self._stalls.check(heartbeats, suspended, self._clock.tick())
        if self.stall is not None:
            self._kill_all()

    def _kill_all(self) -> None:
        self._kill_at = None
        for rank in self._pidfds:
            if rank not in self.deaths:
                self.killed.add(rank)
                self._send(rank, signal.SIGKILL)

    def _send(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfds[rank], number)
