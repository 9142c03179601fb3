"""The words schedules are written in: an action, its kind, and the order of all workers' actions.

Decides nothing about which order is good or legal (see the schedules and `check`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias, final


@final
class Kind(enum.Enum):
    """What an action does with one micro-batch on one partition."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the input and of the weights."""
    INPUT_GRAD = "I"
    """The half of a split backward that the partition before waits for."""
    WEIGHT_GRAD = "W"
    """The other half, which nobody waits for."""


@final
@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    partition: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.partition}.{self.micro_batch}"


Order: TypeAlias = tuple[tuple[Action, ...], ...]
"""One tuple of actions per worker, to be run from left to right."""
