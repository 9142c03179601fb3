"""The balance with the shortest step for one shape: exact, as long as the budget lasts. Pure Python.

Every balance is ruled out by a bound or simulated. A bound belongs to one partition, so most balances are ruled out
together, by the partition they have in common. Knows nothing of why a partition does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import final

from gpipe_cli.balance.nearby import best_nearby
from gpipe_cli.balance.solver import minimise
from gpipe_cli.plan.bound import StepBound
from gpipe_cli.plan.costs import Costs
from gpipe_cli.plan.fit import Fit
from gpipe_cli.plan.steps import step_ms
from gpipe_cli.schedule.checkpoint import Checkpoint
from gpipe_cli.schedule.pipeline_spec import PipelineSpec

__all__ = ["Found", "best_balance", "lowest"]

Balance = tuple[int, ...]
ROUNDING = 1 - 1e-9
"""Bounds and steps add the same numbers in other orders."""
NEARBY = 24
MOST_SEGMENTS = 2_000_000
"""Partitions that are looked at one by one: a second."""


@final
@dataclass(frozen=True)
class Found:
    balance: Balance
    checkpoint: Checkpoint
    step_ms: float
    lower_bound_ms: float
    """No balance of this shape that fits has a shorter step; the step itself where all of them were judged."""


def lowest(costs: Costs, spec: PipelineSpec, fit: Fit) -> tuple[float, Balance] | None:
    """A bound below all balances that fit, and the one that has it; None where none fits."""
    solution = minimise(StepBound(costs, spec, fit), spec.partitions)
    return None if solution is None else (solution.largest, tuple(solution.balance))


def best_balance(
    costs: Costs, spec: PipelineSpec, fit: Fit, start: tuple[float, Balance], budget: int
) -> Found:
    """`start` is what `lowest` gave; `budget` is how many actions may be simulated."""
    bound, balance = start
    actions = 2 * spec.partitions * spec.micro_batches

    checkpoint_of = cache(fit.checkpoint)

    @cache
    def price(balance: Balance) -> float:
        checkpoint = checkpoint_of(balance)
        assert checkpoint is not None, "what does not fit is not judged"
        return step_ms(replace(spec, checkpoint=checkpoint), costs, balance)

    def fits(balance: Balance) -> bool:
        return checkpoint_of(balance) is not None

    def found(balance: Balance, bound: float) -> Found:
        checkpoint = checkpoint_of(balance)
        assert checkpoint is not None
        return Found(balance, checkpoint, price(balance), min(bound, price(balance)))

    best = best_nearby(balance, fits, price, budget=max(1, min(NEARBY, budget // actions)))
    judged = _Judged(costs, spec, fit, price(best))
    if not judged.possible:
        return found(best, bound)
    for number, other in enumerate(judged.balances()):
        if number * actions > budget:
            return found(best, bound)
        if price(other) < price(best):
            best = other
            judged.limit = price(best) * ROUNDING
    return found(best, inf)


@final
class _Judged:
    """The balances that no partition rules out."""

    def __init__(self, costs: Costs, spec: PipelineSpec, fit: Fit, limit: float) -> None:
        self.limit = limit * ROUNDING
        self._layers, self._partitions = costs.layers, spec.partitions
        self._bound = StepBound(costs, spec, fit)
        self.possible = self._partitions * self._layers**2 <= MOST_SEGMENTS
        self._reachable = self._completions() if self.possible else []

    def balances(self) -> Iterator[Balance]:
        return self._from(0, 0)

    def _from(self, partition: int, begin: int) -> Iterator[Balance]:
        if partition == self._partitions:
            yield ()
            return
        for end in self._ends(partition, begin):
            for rest in self._from(partition + 1, end):
                yield (end - begin, *rest)

    def _ends(self, partition: int, begin: int) -> Iterator[int]:
        """Where the partition may end so that the others have a way to the last layer."""
        following = self._reachable[partition + 1]
        for end in range(begin + 1, self._layers + 1):
            if self._bound.cost(partition, begin, end) >= self.limit:
                return  # it grows with every layer
            if end in following:
                yield end

    def _completions(self) -> list[set[int]]:
        """For each partition where it may begin so that it and the ones after it can hold the rest."""
        self._reachable = [set() for _ in range(self._partitions)] + [{self._layers}]
        for partition in reversed(range(self._partitions)):
            begins = range(partition, self._layers) if partition else (0,)
            self._reachable[partition] = {
                begin for begin in begins if next(self._ends(partition, begin), None) is not None
            }
        return self._reachable
