"""What a balance method returns: layers per partition, and the costs it compared; and how users may call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from numbers import Integral
from typing import Any, final

from torch import nn

from gpipe_cli.balance.memory_objective import MemoryObjective, WithinMemory
from gpipe_cli.balance.solver import Additive, Objective, Solution, minimize, sums
from gpipe_cli.profiling.records import LayerTimes

Balancer = Callable[..., list[int]]
TORCHGPIPE_ORDER = ("partitions", "module", "sample")


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
    phases: Sequence[LayerTimes] = ()
    """The forward and backward of each layer in this unit, where the method knows them."""

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
        solution = minimize(objective, partitions)
        assert solution is not None, "only a limit can rule out every balance"
        return solution
    solution = minimize(WithinMemory(objective, memory), partitions)
    if solution is None:
        raise memory.refusal()
    return solution


def either_order(**refused: str) -> Callable[[Balancer], Balancer]:
    """Let a function of `(module, sample, partitions, ...)` also be called in the order of torchgpipe 0.0.6 and later.

    That order, `(partitions, module, sample)`, is recognized by the integer in front. `refused` gives, for keywords
    that torchgpipe's users may expect, what to do instead.
    """

    def decorate(function: Balancer) -> Balancer:
        @wraps(function)
        def balance(*args: Any, **named: Any) -> list[int]:
            return function(**_arguments(function, args, named, refused))

        return balance

    return decorate


def _arguments(
    function: Balancer, args: tuple[Any, ...], named: dict[str, Any], refused: Mapping[str, str]
) -> dict[str, Any]:
    """The arguments by the function's own names; TypeError if they do not fit."""
    name = function.__name__
    for keyword in refused.keys() & named.keys():
        raise TypeError(f"{name}: {keyword}={named[keyword]!r} cannot be used; {refused[keyword]}")
    if "input" in named:  # torchgpipe's name for the sample of balance_by_size
        named = _joined(name, {"sample": named.pop("input")}, named)
    if args and isinstance(args[0], Integral):
        if len(args) > len(TORCHGPIPE_ORDER):
            raise TypeError(f"{name}: after partitions, module and sample, arguments are given by name")
        args, named = (), _joined(name, dict(zip(TORCHGPIPE_ORDER, args, strict=False)), named)
    try:
        given = inspect.signature(function).bind(*args, **named).arguments
    except TypeError as error:
        raise TypeError(f"{name}: {error}; call it as (module, sample, partitions)") from error
    if not isinstance(given["module"], nn.Sequential):
        raise TypeError(f"{name}: module must be an nn.Sequential, not a {type(given['module']).__name__}")
    if not isinstance(given.get("partitions", 1), Integral):
        raise TypeError(f"{name}: partitions must be an integer, not a {type(given['partitions']).__name__}")
    return given


def _joined(name: str, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    if twice := first.keys() & second.keys():
        raise TypeError(f"{name}: {min(twice)} is given twice")
    return first | second
