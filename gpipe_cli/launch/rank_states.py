"""What is known of all ranks, and the verdict: whether the run must end, and because of which rank.

One failure brings down all ranks: the others only lose their peer, and torch names whichever it polls first. The root
cause is the first rank that failed on its own. A rank is frozen if it is suspended, or in the same step, for longer
than `step_timeout`. The launcher itself looks what its ranks do; under torchrun the monitors of all ranks report to
that of rank 0.

Times are those at which a report arrives where it is judged: the clocks of two machines cannot be compared. A host is
lost when its kernel no longer acknowledges what it is sent. A monitor that is silent on a host that answers is only
stopped or slow, so its rank counts as unknown, and ends nothing while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import (
    ConfigError,
    DataError,
    GpipeError,
    NumericError,
    PeerError,
    PeerRaised,
    ResourceError,
    RunError,
    StepTimeout,
)
from gpipe_cli.launch.interfaces import is_connected
from gpipe_cli.launch.rank_files import NOT_IN_STEP, ExitReport

SETTLE_SECONDS = 2.0
"""How long to wait for the report of the rank that failed first, after one that only lost its peer."""
MISSED_SECONDS = 3.0
"""A rank that is silent for so long, several heartbeats, is lost if others are or if a step does not end."""
STARTING_SECONDS = 60.0
"""How long a rank may at least take to connect: hosts read their programs from disks of unequal speed."""
DIED = ": ended without a report: it was killed, perhaps because memory ran out"
SUSPENDED = -1.0
"""Takes the place of the heartbeat of a rank that is suspended outside a step."""
ERRORS_BY_EXIT_CODE = {
    kind.exit_code: kind
    for kind in (ConfigError, DataError, RunError, NumericError, ResourceError, PeerError)
}
"""A verdict passes these on with their exit codes; any other exit code means that a layer raised."""


@final
class StallDetector:
    def __init__(self, step_timeout: float) -> None:
        self._step_timeout = step_timeout
        self._unchanged: dict[int, tuple[float, float]] = {}
        """Each rank's last heartbeat, and since when it has not changed."""

    def check(
        self, heartbeats: Mapping[int, float], suspended: Collection[int], now: float
    ) -> tuple[list[int], str] | None:
        """The ranks that were suspended for too long, or kept a step from ending in time, and what they are doing.

        now: by an `AwakeClock`. The heartbeats themselves may come from the clocks of other machines.
        """
        # A list, not a generator: every rank's heartbeat has to be recorded, not only those up to the first overdue.
        overdue = [
            rank for rank in heartbeats if self._is_overdue(rank, heartbeats[rank], rank in suspended, now)
        ]
        if not overdue:
            return None
        # Ranks inside a step wait for their peers: a rank that has not entered it keeps the others waiting.
        outside_step = [rank for rank, heartbeat in heartbeats.items() if heartbeat == NOT_IN_STEP]
        if suspended:
            return sorted(suspended), "stopped (SIGSTOP, or a debugger)"
        return outside_step or list(heartbeats), "in a step that does not end"

    def _is_overdue(self, rank: int, heartbeat: float, suspended: bool, now: float) -> bool:
        state = SUSPENDED if suspended and heartbeat == NOT_IN_STEP else heartbeat
        before, since = self._unchanged.get(rank, (NOT_IN_STEP, 0.0))
        if state != before:
            since = now
            self._unchanged[rank] = state, since
        return state != NOT_IN_STEP and now - since > self._step_timeout


def is_suspended(process_id: int) -> bool:
    return process_state(process_id) in ("T", "t")


def process_state(process_id: int) -> str:
    """The letter that the kernel gives the state of a process; "" for a process that is gone."""
    # The state follows the process name, which stands in brackets and may itself contain brackets and spaces.
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@final
@dataclass(frozen=True)
class RankStatus:
    """What a launcher sees of a rank, or a monitor reports about its own, several times a second."""

    step_began: float = NOT_IN_STEP
    suspended: bool = False
    report: ExitReport | None = None
    """Written by the rank when it fails or finishes; it may still be running."""
    ended: str = ""
    """How its process ended, as a message goes on after the name of the rank; empty while it runs."""
    unanswered: tuple[str, ...] = ()
    """Addresses that do not acknowledge what its host sends, in a step that takes long."""

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
            str(content["ended"]),
            tuple(map(str, content["unanswered"])),
        )


@final
@dataclass(frozen=True)
class Surroundings:
    """What the monitor of a rank knows of the hosts, seen from its own."""

    rank: int
    hosts: dict[int, str]
    """The name of each rank's host."""
    describe: Callable[[int], str]
    """A rank, for messages."""
    interface: str | None = None
    """The network interface that leads to the other hosts."""

    def names(self, ranks: Sequence[int]) -> str:
        return " and ".join(f"rank {rank} ({self.describe(rank)})" for rank in ranks)

    def lost_error(self, ranks: Sequence[int], seconds: float, *, hears_others: bool) -> PeerError:
        """The error for ranks whose hosts are silent; hears_others: whether another host than this one is not."""
        here, silent = self.hosts[self.rank], sorted({self.hosts[rank] for rank in ranks})
        names = f"{self.names(ranks)}: not heard of for {seconds:.0f} seconds"
        if self.interface is not None and not is_connected(self.interface):
            return PeerError(f"the network link {self.interface} of {here} is down; {names}")
        if len(silent) > 1 and not hears_others:
            return PeerError(
                f"{here} has lost all other hosts: its own network is cut, or theirs is; {names}"
            )
        them, are = (silent[0], "is") if len(silent) == 1 else ("their hosts", "are")
        return PeerError(f"{names}; {them} {are} down, or the network between {here} and {them} is cut")


@final
class RankStates:
    def __init__(
        self, size: int, *, silence: float, step_timeout: float | None, surroundings: Surroundings
    ) -> None:
        """silence: seconds after which a rank whose host is not heard of is lost."""
        self._silence, self._step_timeout, self._surroundings = silence, step_timeout, surroundings
        self._heard_at = dict.fromkeys(range(size), 0.0)
        self._reported_at = dict.fromkeys(range(size), 0.0)
        self.addresses: dict[str, str] = {}
        """The name of the host that has each address."""
        self._statuses = dict.fromkeys(range(size), RankStatus())
        self._failures: dict[int, ExitReport] = {}
        """With the time of this machine, and the message as it goes on after the name of the rank."""
        self._stalls = None if step_timeout is None else StallDetector(step_timeout)

    @property
    def all_finished(self) -> bool:
        return all(status.finished for status in self._statuses.values())

    def hear(self, rank: int, status: RankStatus, now: float) -> None:
        self._heard_at[rank] = self._reported_at[rank] = now
        self._statuses[rank] = status
        if status.report is not None and not status.report.is_clean:
            self._failures.setdefault(
                rank, replace(status.report, message=f": {status.report.message}", time=now)
            )
        elif status.ended and status.report is None:
            self._fail(rank, status.ended, now)

    def reach(self, rank: int, at: float) -> None:
        """The kernel of the rank's host has answered at that time."""
        self._heard_at[rank] = max(self._heard_at[rank], at)

    def is_silent(self, rank: int, now: float) -> bool:
        """Whether the rank's monitor does not report; its host may still answer."""
        return now - self._reported_at[rank] > MISSED_SECONDS

    def disconnect(self, rank: int, now: float) -> None:
        """The connection to the rank's monitor is closed: the monitor has ended, and its rank before it."""
        if not self._statuses[rank].finished:
            self._fail(rank, DIED, now)

    def verdict(self, now: float) -> GpipeError | None:
        failures = self._failures.values()
        settled = any(now - report.time > SETTLE_SECONDS for report in failures)
        if settled or any(not report.caused_by_peer for report in failures):
            return self._root_cause()
        running = [rank for rank, status in self._statuses.items() if not status.finished]
        if lost := self._silent_for(self._silence, running, now):
            return lost
        if self._stalls is None or self._step_timeout is None:
            return None
        known = [rank for rank in running if not self.is_silent(rank, now)]
        stall = self._stalls.check(
            {rank: self._statuses[rank].step_began for rank in known},
            [rank for rank in known if self._statuses[rank].suspended],
            now,
        )
        if stall is None:
            return None
        ranks, doing = stall
        # A step that began just before a link was cut is overdue before the silence is.
        return (
            self._silent_for(MISSED_SECONDS, running, now)
            or self._cut_link(known)
            or StepTimeout(
                f"{self._surroundings.names(ranks)}: {doing}; no answer within step_timeout={self._step_timeout:g} "
                "seconds"
            )
        )

    def _root_cause(self) -> GpipeError:
        """The error of the first rank that failed on its own, else of the first that failed."""
        # Time alone would blame a victim: a peer may report a closed connection before the rank that closed it is
        # recorded.
        rank, failure = min(self._failures.items(), key=lambda item: (item[1].caused_by_peer, item[1].time))
        kind = ERRORS_BY_EXIT_CODE.get(failure.exit_code, PeerRaised)
        return kind(f"{self._surroundings.names([rank])}{failure.message}")

    def _cut_link(self, ranks: Sequence[int]) -> PeerError | None:
        """The error for hosts that do not reach each other, although both reach this one."""
        pairs = {
            " and ".join(sorted((self._surroundings.hosts[rank], self.addresses[address])))
            for rank in ranks
            for address in self._statuses[rank].unanswered
            if address in self.addresses
        }
        if not pairs:
            return None
        return PeerError(
            f"the network between {', and between '.join(sorted(pairs))} is cut, in one direction or both: packets are "
            f"not acknowledged, and a step does not end within step_timeout={self._step_timeout:g} seconds"
        )

    def _silent_for(self, seconds: float, ranks: Sequence[int], now: float) -> PeerError | None:
        """The error for all ranks that are silent, once one of them has been for so long; a host has several."""
        silent = {rank: now - self._heard_at[rank] for rank in ranks}
        silent = {rank: time for rank, time in silent.items() if time > self._limit(rank)}
        longest = max(silent.values(), default=0.0)
        if longest <= seconds:
            return None
        hosts = self._surroundings.hosts
        hears_others = {hosts[rank] for rank in ranks if rank not in silent} - {
            hosts[self._surroundings.rank]
        }
        return self._surroundings.lost_error(list(silent), longest, hears_others=bool(hears_others))

    def _limit(self, rank: int) -> float:
        return MISSED_SECONDS if self._heard_at[rank] else STARTING_SECONDS

    def _fail(self, rank: int, message: str, now: float) -> None:
        self._failures.setdefault(rank, ExitReport(PeerError.exit_code, message, time=now))
