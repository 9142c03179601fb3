"""Early stopping: when a run whose evaluations no longer improve ends. `save_and_stop` in runs/snapshots ends it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from gpipe_cli.values import lower_is_better


@final
@dataclass(frozen=True)
class PatienceState:
    """How long a run has waited for a better evaluation. Snapshots store it as JSON under these field names."""

    metric: str
    value: float
    """The metric at the last evaluation that was better than those before it."""
    step: int
    """The step of the same evaluation."""
    evaluations: int = 0
    """How many evaluations there were since then."""


@final
@dataclass(frozen=True)
class EarlyStop:
    metric: str
    patience: int
    """Evaluations without an improvement after which the run ends."""
    min_delta: float = 0.0
    """An evaluation that is better by this much or less is no improvement."""

    def after(self, value: float, step: int, state: PatienceState | None) -> PatienceState:
        """Count an evaluation; `state` is the result of the previous call, if any."""
        if state is None or state.metric != self.metric:
            return PatienceState(self.metric, value, step)
        gain = state.value - value if lower_is_better(self.metric) else value - state.value
        if gain > self.min_delta:
            return PatienceState(self.metric, value, step)
        return replace(state, evaluations=state.evaluations + 1)

    def reason(self, state: PatienceState | None) -> str | None:
        """Why the run ends now, if it does."""
        if state is None or state.metric != self.metric or state.evaluations < self.patience:
            return None
        evaluations = f"{state.evaluations} evaluation{'s' if state.evaluations > 1 else ''}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"{evaluations} without a {self.metric} better than {state.value:.4g} (step {state.step}){by}"
