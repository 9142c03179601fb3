"""What the monitors of all ranks report to that of rank 0, and the verdict: whether the run must end, and why.

Times are those of rank 0's machine when a report arrives: the clocks of two machines cannot be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from gpipe_cli.errors import GpipeError, PeerError
from gpipe_cli.launch.heartbeat import NOT_IN_STEP
from gpipe_cli.launch.rank_files import ExitReport
from gpipe_cli.launch.root_cause import RankExit, root_cause
from gpipe_cli.launch.stalls import StallDetector

SETTLE_SECONDS = 2.0
"""How long to wait for the report of the rank that failed first, after one that only lost its peer."""
MISSED_SECONDS = 3.0
"""A rank that is silent for so long, several heartbeats, is lost if others are or if a step does not end."""
STARTING_SECONDS = 60.0
"""How long a rank may at least take to connect: hosts read their programs from disks of unequal speed."""
DIED = "ended without a report: it was killed, perhaps because memory ran out"


@final
@dataclass(frozen=True)
class RankStatus:
    """What a monitor reports about its rank, twice a second."""

    step_began: float = NOT_IN_STEP
    suspended: bool = False
    report: ExitReport | None = None
    """Written by the rank when it fails or finishes; it may still be running."""
    ended: bool = False
    """Whether its process is gone."""

    @property
    def finished(self) -> bool:
        """Its process may go on, with the next job of a sweep."""
        return self.report is not None and self.report.is_clean

    def to_json(self) -> dict[str, Any]:
        report = None if self.report is None else asdict(replace(self.report, summary=None))
        return {**vars(self), "report": report}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> RankStatus:
        report = content["report"]
        return RankStatus(
            float(content["step_began"]),
            bool(content["suspended"]),
            None if report is None else ExitReport(**report),
            bool(content["ended"]),
        )


def lost_error(names: list[str], seconds: float) -> PeerError:
    """The error for ranks whose monitors are silent."""
    return PeerError(
        f"{' and '.join(names)}: not heard of for {seconds:.0f} seconds; its host is down or its network is cut"
    )


@final
class RankStates:
    def __init__(
        self, size: int, *, silence: float, step_timeout: float | None, describe: Callable[[int], str]
    ) -> None:
        """silence: seconds after which a rank that is not heard of is lost; describe: a rank, for messages."""
        self._silence, self._step_timeout, self._describe = silence, step_timeout, describe
        self._heard_at = dict.fromkeys(range(size), 0.0)
        self._statuses = dict.fromkeys(range(size), RankStatus())
        self._failures: dict[int, ExitReport] = {}
        self._stalls = None if step_timeout is None else StallDetector(step_timeout)

    @property
    def all_finished(self) -> bool:
        return all(status.finished for status in self._statuses.values())

    def hear(self, rank: int, status: RankStatus, now: float) -> None:
        self._heard_at[rank], self._statuses[rank] = now, status
        if status.report is not None and not status.report.is_clean:
            self._failures.setdefault(rank, replace(status.report, time=now))
        elif status.ended and status.report is None:
            self._fail(rank, DIED, now)

    def disconnect(self, rank: int, now: float) -> None:
        """The connection to the rank's monitor is closed: the monitor has ended, and its rank before it."""
        if not self._statuses[rank].finished:
            self._fail(rank, DIED, now)

    def verdict(self, now: float) -> GpipeError | None:
        failures = self._failures.values()
        settled = any(now - report.time > SETTLE_SECONDS for report in failures)
        if settled or any(not report.caused_by_peer for report in failures):
            exits = [
                RankExit(rank, self._describe(rank), report=report) for rank, report in self._failures.items()
            ]
            return root_cause(exits)
        running = [rank for rank, status in self._statuses.items() if not status.finished]
        if lost := self._silent_for(self._silence, running, now):
            return lost
        if self._stalls is None or self._step_timeout is None:
            return None
        stall = self._stalls.check(
            {rank: self._statuses[rank].step_began for rank in running},
            [rank for rank in running if self._statuses[rank].suspended],
            now,
        )
        if stall is None:
            return None
        # A step that began just before a link was cut is overdue before the silence is.
        return self._silent_for(MISSED_SECONDS, running, now) or stall.error(
            self._names(stall.ranks), self._step_timeout
        )

    def _silent_for(self, seconds: float, ranks: Sequence[int], now: float) -> PeerError | None:
        """The error for all ranks that are silent, once one of them has been for so long; a host has several."""
        silent = {rank: now - self._heard_at[rank] for rank in ranks}
        silent = {rank: time for rank, time in silent.items() if time > self._limit(rank)}
        longest = max(silent.values(), default=0.0)
        return lost_error(self._names(list(silent)), longest) if longest > seconds else None

    def _limit(self, rank: int) -> float:
        return MISSED_SECONDS if self._heard_at[rank] else STARTING_SECONDS

    def _names(self, ranks: Sequence[int]) -> list[str]:
        return [f"rank {rank} ({self._describe(rank)})" for rank in ranks]

    def _fail(self, rank: int, message: str, now: float) -> None:
        self._failures.setdefault(rank, ExitReport(PeerError.exit_code, message, time=now))
