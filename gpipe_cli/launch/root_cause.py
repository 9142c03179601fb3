"""Find the root cause among several ranks that ended: one failure brings down all of them.

The other ranks only lose their peer, and torch names whichever it polls first. This module names the first rank that
failed on its own.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import final

from gpipe_cli.errors import (
    ConfigError,
    DataError,
    GpipeError,
    NumericError,
    PeerError,
    PeerRaised,
    ResourceError,
    RunError,
)
from gpipe_cli.launch.rank_files import ExitReport

ERRORS_BY_EXIT_CODE = {
    kind.exit_code: kind
    for kind in (ConfigError, DataError, RunError, NumericError, ResourceError, PeerError)
}
"""The launcher passes these on with their exit codes; any other exit code means that a layer raised."""


@final
@dataclass(frozen=True)
class RankExit:
    """How a rank ended, as the launcher observed it."""

    rank: int
    description: str
    """Which part of the model it held, for messages."""
    signal: int | None = None
    """The signal that killed it; None if the launcher itself sent it."""
    died_at: float = inf
    """By the monotonic clock."""
    report: ExitReport | None = None

    @property
    def failed(self) -> bool:
        return self.report is None or not self.report.is_clean

    @property
    def failed_on_its_own(self) -> bool:
        return self.signal is not None or (self.report is not None and not self.report.caused_by_peer)

    @property
    def failed_at(self) -> float:
        # When the error was raised, if known: ranks take unequally long from there to their death.
        return self.died_at if self.report is None else self.report.time

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.description})"


def root_cause(exits: Sequence[RankExit]) -> GpipeError | None:
    """The error of the first rank that failed on its own, else of the first that failed; None if none did."""
    failed = [exit for exit in exits if exit.failed]
    if not failed:
        return None
    # Time alone would blame a victim: a peer may report a closed connection before the rank that closed it is
    # recorded.
    first = min(failed, key=lambda exit: (not exit.failed_on_its_own, exit.failed_at))
    if first.report is not None:
        kind = ERRORS_BY_EXIT_CODE.get(first.report.exit_code, PeerRaised)
        return kind(f"{first.name}: {first.report.message}")
    if first.signal is None:
        return PeerError(f"{first.name} exited without a report")
    hint = ", perhaps because memory ran out" if first.signal == signal.SIGKILL else ""
    return PeerError(f"{first.name} was killed by {signal.Signals(first.signal).name}{hint}")
