"""When a rank counts as frozen: suspended, or in the same step, for longer than `step_timeout`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.errors import StepTimeout
from gpipe_cli.launch.heartbeat import NOT_IN_STEP

SUSPENDED = -1.0
"""Takes the place of the heartbeat of a rank that is suspended outside a step."""


@final
@dataclass(frozen=True)
class Stall:
    ranks: list[int]
    """Those that were suspended for too long, or kept a step from ending in time."""
    suspended: bool
    """Whether a signal holds them."""

    def error(self, names: str, step_timeout: float) -> StepTimeout:
        state = "stopped (SIGSTOP, or a debugger)" if self.suspended else "in a step that does not end"
        return StepTimeout(f"{names}: {state}; no answer within step_timeout={step_timeout:g} seconds")


@final
class StallDetector:
    def __init__(self, step_timeout: float) -> None:
        self._step_timeout = step_timeout
        self._unchanged: dict[int, tuple[float, float]] = {}
        """Each rank's last heartbeat, and since when it has not changed."""

    def check(self, heartbeats: Mapping[int, float], suspended: Collection[int], now: float) -> Stall | None:
        """now: by an `AwakeClock`. The heartbeats themselves may come from the clocks of other machines."""
        # A list, not a generator: every rank's heartbeat has to be recorded, not only those up to the first overdue.
        overdue = [
            rank for rank in heartbeats if self._is_overdue(rank, heartbeats[rank], rank in suspended, now)
        ]
        if not overdue:
            return None
        # Ranks inside a step wait for their peers: a rank that has not entered it keeps the others waiting.
        outside_step = [rank for rank, heartbeat in heartbeats.items() if heartbeat == NOT_IN_STEP]
        return Stall(sorted(suspended) or outside_step or list(heartbeats), suspended=bool(suspended))

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
