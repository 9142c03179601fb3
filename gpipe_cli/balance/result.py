"""What a balance method answers with: layers per partition, and the costs it weighed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from gpipe_cli.balance.solver import solve


@final
@dataclass(frozen=True)
class Balanced:
    layers: list[int]
    costs: list[float]
    """One number per layer."""
    unit: str

    @classmethod
    def by(cls, costs: Sequence[float], partitions: int, unit: str) -> Balanced:
        """The balance whose costliest partition is as cheap as possible."""
        return cls(solve(costs, partitions).balance, list(costs), unit)

    @property
    def sums(self) -> list[float]:
        """The cost of each partition."""
        ends = list(accumulate(self.layers))
        return [sum(self.costs[end - length : end]) for end, length in zip(ends, self.layers, strict=True)]

    @property
    def largest(self) -> float:
        return max(self.sums)

    @property
    def lower_bound(self) -> float:
        """No balance of so many partitions has a cheaper costliest one."""
        return solve(self.costs, len(self.layers)).largest

    @property
    def imbalance(self) -> float:
        """The largest over the mean: 1 is even."""
        mean = sum(self.sums) / len(self.sums)
        return self.largest / mean if mean else 1.0
