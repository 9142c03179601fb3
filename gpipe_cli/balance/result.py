"""What a balance method answers with: layers per partition, and the costs it weighed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.balance.memory import Limited, Memory
from gpipe_cli.balance.solver import Additive, Objective, Solution, minimise, sums


@final
@dataclass(frozen=True)
class Balanced:
    layers: list[int]
    costs: list[float]
    """One number per layer."""
    unit: str
    sums: list[float]
    """What each partition costs by the method's objective, which need not be the sum of its layers' costs."""
    lower_bound: float
    """No balance of so many partitions has a cheaper costliest one (and fits, if a memory limit was given)."""

    @classmethod
    def by(cls, costs: Sequence[float], partitions: int, unit: str, memory: Memory | None = None) -> Balanced:
        """The balance whose costliest partition is as cheap as possible."""
        found = best(Additive(costs), partitions, memory)
        return cls.of(found.balance, costs, unit, found.largest)

    @classmethod
    def of(
        cls,
        layers: Sequence[int],
        costs: Sequence[float],
        unit: str,
        lower_bound: float | None = None,
        objective: Objective | None = None,
    ) -> Balanced:
        """This balance, with what it costs; by default that is the sum over its layers."""
        objective = objective or Additive(costs)
        if lower_bound is None:
            lower_bound = best(objective, len(layers)).largest
        return cls(list(layers), list(costs), unit, sums(objective, layers), lower_bound)

    @property
    def largest(self) -> float:
        return max(self.sums)

    @property
    def imbalance(self) -> float:
        """The largest over the mean: 1 is even."""
        mean = sum(self.sums) / len(self.sums)
        return self.largest / mean if mean else 1.0


def best(objective: Objective, partitions: int, memory: Memory | None = None) -> Solution:
    """The solver's answer among the balances that fit; a limit that none keeps is refused."""
    if memory is None or memory.limit is None:
        found = minimise(objective, partitions)
        assert found is not None, "only a limit can rule out every balance"
        return found
    limited = minimise(Limited(objective, memory), partitions)
    if limited is None:
        raise memory.refusal()
    return limited
