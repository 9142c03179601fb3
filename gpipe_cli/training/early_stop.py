"""Early stopping: end a run whose evaluations no longer improve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from gpipe_cli.values import lower_is_better


@final
@dataclass(frozen=True)
class Waiting:
    """How long a run has waited for a better evaluation. Snapshots store it as JSON under these field names."""

    metric: str
    value: float
    """Of the last evaluation that was better than those before it."""
    step: int
    """That of the same evaluation."""
    evaluations: int = 0
    """Since then."""


@final
@dataclass(frozen=True)
class EarlyStop:
    metric: str
    patience: int
    """Evaluations without an improvement after which the run ends."""
    min_delta: float = 0.0
    """An evaluation that is better by this much or less is no improvement."""

    def after(self, value: float, step: int, waiting: Waiting | None) -> Waiting:
        """Count an evaluation; `waiting` is the result of the previous call, if any."""
        if waiting is None or waiting.metric != self.metric:
            return Waiting(self.metric, value, step)
        gain = waiting.value - value if lower_is_better(self.metric) else value - waiting.value
        if gain > self.min_delta:
            return Waiting(self.metric, value, step)
        return replace(waiting, evaluations=waiting.evaluations + 1)

    def reason(self, waiting: Waiting | None) -> str | None:
        """Why the run ends now, if it does."""
        if waiting is None or waiting.metric != self.metric or waiting.evaluations < self.patience:
            return None
        evaluations = f"{waiting.evaluations} evaluation{'s' if waiting.evaluations > 1 else ''}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"{evaluations} without a {self.metric} better than {waiting.value:.4g} (step {waiting.step}){by}"
        )
