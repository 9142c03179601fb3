"""What an engine asks of the other processes that work on the same step, where there are any.

A process alone asks nobody: `Alone` gives back what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from gpipe_cli.engines.protocol import StepFacts
from gpipe_cli.engines.state import EngineState

__all__ = ["Alone", "BadOutput", "Peers"]

BadOutput = tuple[int, int]
"""A layer and a micro-batch."""


class Peers(Protocol):
    def share_of(self, samples: int) -> float:
        """The part that so many samples are of those of all replicas."""

    def facts(self, own: StepFacts | None) -> StepFacts:
        """Those of all replicas added up; None where the last layer is in another process, or had nothing to do."""

    def norms(self, own: Tensor) -> Tensor:
        """The norms of all gradients in the order of the model's names, given those of this process; -1: none."""

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Let all leave the step out if one must."""

    def first_bad_output(self, own: BadOutput | None) -> BadOutput | None:
        """The first of all processes'."""

    def last_of(self, names: Sequence[str]) -> str | None:
        """The last, in the order of the model's names, of all processes' names."""

    def whole(self, own: EngineState) -> EngineState:
        """The state of the whole model where it is to be saved, an empty one elsewhere."""


@final
class Alone:
    def share_of(self, samples: int) -> float:
        return 1.0

    def facts(self, own: StepFacts | None) -> StepFacts:
        assert own is not None, "a process alone has the last layer"
        return own

    def norms(self, own: Tensor) -> Tensor:
        return own

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        pass

    def first_bad_output(self, own: BadOutput | None) -> BadOutput | None:
        return own

    def last_of(self, names: Sequence[str]) -> str | None:
        return names[-1] if names else None

    def whole(self, own: EngineState) -> EngineState:
        return own
