"""What a balance method returns: layers per partition, and the costs it compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.balance.memory_objective import MemoryObjective, WithinMemory
from gpipe_cli.balance.solver import Additive, Objective, Solution, minimise, sums


@final
@dataclass(frozen=True)
class BalanceResult:
    layers: list[int]
    costs: list[float]
    """One number per layer."""
    unit: str
    sums: list[float]
    """The cost of each partition by the method's objective, which need not be the sum of its layers' costs."""
    lower_bound: float
    """The costliest partition of any balance (that fits, if there is a memory limit) costs at least this."""

    @classmethod
    def by(
        cls, costs: Sequence[float], partitions: int, unit: str, memory: MemoryObjective | None = None
    ) -> BalanceResult:
        """The balance whose costliest partition is as cheap as possible."""
        solution = solve_within(Additive(costs), partitions, memory)
        return cls.of(solution.balance, costs, unit, solution.largest)

    @classmethod
    def of(
        cls,
        layers: Sequence[int],
        costs: Sequence[float],
        unit: str,
        lower_bound: float | None = None,
        objective: Objective | None = None,
    ) -> BalanceResult:
        """This balance with its cost, by default the sum over its layers."""
        objective = objective or Additive(costs)
        if lower_bound is None:
            lower_bound = solve_within(objective, len(layers)).largest
        return cls(list(layers), list(costs), unit, sums(objective, layers), lower_bound)

    @property
    def largest(self) -> float:
        return max(self.sums)

    @property
    def imbalance(self) -> float:
        """The largest over the mean: 1 is even."""
        mean = sum(self.sums) / len(self.sums)
        return self.largest / mean if mean else 1.0


def solve_within(objective: Objective, partitions: int, memory: MemoryObjective | None = None) -> Solution:
    """The best of the balances that fit; raises if there is a limit and none does."""
    if memory is None or memory.limit is None:
        solution = minimise(objective, partitions)
        assert solution is not None, "only a limit can rule out every balance"
        return solution
    solution = minimise(WithinMemory(objective, memory), partitions)
    if solution is None:
        raise memory.refusal()
    return solution
