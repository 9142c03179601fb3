"""What an engine is to the training loop: it takes a batch and gives back numbers.

Forward, backward, clipping, the finite check and the update happen inside; the engine owns the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gpipe_cli.engines.state import EngineState
from gpipe_cli.engines.utilisation import Utilisation
from gpipe_cli.offload.transfers import Transfers

Value = Tensor | tuple[Tensor, ...]
Batch = tuple[Value, Tensor]
Measure = Callable[[Any, Tensor], Mapping[str, float]]
"""Sums over the samples of a batch, such as how many were classified right."""


@dataclass(frozen=True)
class StepFacts:
    """What one step found; sums are over the samples of the batch."""

    loss: float
    samples: int
    sums: Mapping[str, float]
    grad_norm: float | None = None
    skipped: bool = False
    """The update was left out because fp16 gradients overflowed."""
    transfers: Transfers | None = None
    """What it took to bring the model in and put it away, where it does not stay on its devices."""
    utilisation: Utilisation | None = None
    """How busy its partitions were, where the engine was asked to look."""


@dataclass(frozen=True)
class Objective:
    """What every engine is told of the task: what to minimise, how to update, what to count."""

    loss: Callable[[Any, Tensor], Tensor]
    measure: Measure
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    """None where nothing is trained."""
    clip_grad_norm: float | None = None
    precision: str = "fp32"


class Engine(Protocol):
    @property
    def module(self) -> nn.Module:
        """The model; its state_dict speaks the original names."""

    def train_step(self, batch: Batch, key: int, lr: float) -> StepFacts:
        """One update from one mini-batch."""

    def eval_step(self, batch: Batch) -> StepFacts:
        """Loss and counts of one mini-batch; nothing changes."""

    def state(self) -> EngineState:
        """All that training changes, by the original names."""

    def load_state(self, state: EngineState) -> None:
        """Go on from there."""

    def close(self) -> None:
        """End workers; twice is fine."""
