"""Which of several ranks that ended is to blame, and the one error that says so.

One failure brings all ranks down: the others lose their peer, and torch names whichever it looks at first. Here the
first to go wrong by itself is named. Knows nothing of processes: it is given how each of them ended.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import final

from gpipe_cli.engines.meeting import LastWord
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

OWN_CODES = {
    kind.exit_code: kind
    for kind in (ConfigError, DataError, RunError, NumericError, ResourceError, PeerError)
}
"""What a rank may say of itself and keep its exit code; anything else was raised by its layers."""


@final
@dataclass(frozen=True)
class End:
    """How a rank ended."""

    rank: int
    place: str
    """Its part of the model, for people."""
    signal: int | None = None
    """What killed it, unless the launcher did."""
    died: float = inf
    """When, by the monotonic clock."""
    word: LastWord | None = None

    @property
    def failed(self) -> bool:
        return self.word is None or not self.word.in_order

    @property
    def by_itself(self) -> bool:
        return self.signal is not None or (self.word is not None and not self.word.blames_a_peer)

    @property
    def went_wrong(self) -> float:
        return self.died if self.word is None else self.word.when

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.place})"


def failure(ends: Sequence[End]) -> GpipeError | None:
    """The error of the first rank that failed by itself, else of the first that failed; None if none did."""
    failed = [end for end in ends if end.failed]
    if not failed:
        return None
    first = min(failed, key=lambda end: (not end.by_itself, end.went_wrong))
    word = first.word
    if word is not None:
        return OWN_CODES.get(word.exit_code, PeerRaised)(f"{first.name}: {word.text}")
    if first.signal is None:
        return PeerError(f"{first.name} ended without a word")
    likely = ", perhaps because memory ran out" if first.signal == signal.SIGKILL else ""
    return PeerError(f"{first.name} was killed by {signal.Signals(first.signal).name}{likely}")


def frozen(names: Sequence[str], stopped: bool, step_timeout: float) -> StepTimeout:
    """A step that does not end, by those who keep it from ending."""
    who = " and ".join(names)
    how = "stopped (SIGSTOP, or a debugger)" if stopped else "in a step that does not end"
    return StepTimeout(f"{who}: {how}; no answer within step_timeout={step_timeout:g} seconds")
