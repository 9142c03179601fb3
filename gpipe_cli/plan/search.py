"""The joint search: of all shapes and balances that fit, those with the shortest steps. Exact while time lasts.

Shapes are taken by their lower bounds, so that most are never looked into: once enough plans are better than a shape
can be, it is done with. A bound that costs nothing comes first, then one that knows the layers and their memory. Knows
nothing of torch, and of costs and memory only that somebody has them for a shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import final

from gpipe_cli.plan.balances import Balance, Found, best_balance, lowest
from gpipe_cli.plan.bound import least_step
from gpipe_cli.plan.costs import Costs
from gpipe_cli.plan.fit import Fit
from gpipe_cli.plan.shape import Shape
from gpipe_cli.plan.steps import can_be_simulated

__all__ = ["Answer", "Searched", "search"]

ACTIONS = 200_000
"""Simulated for one shape at most: half a second."""


@final
@dataclass(frozen=True)
class Answer:
    """The best balance of one shape, which says what each partition recomputes."""

    shape: Shape
    found: Found


@final
@dataclass(frozen=True)
class Searched:
    answers: list[Answer]
    """By their steps; no other shape is better than the last of them."""
    lower_bound_ms: float
    """No plan that fits has a shorter step."""
    too_large: int
    """Shapes looked into that no balance makes fit."""
    left_out: int
    """Shapes that nobody can simulate, or for which there was no time."""

    @property
    def gap(self) -> float:
        """By how much the best plan may be beaten."""
        return self.answers[0].found.step_ms / self.lower_bound_ms - 1 if self.answers else inf


@final
@dataclass(frozen=True)
class _Waiting:
    """A shape whose bound is known, by itself or with the balance that has it."""

    shape: Shape
    costs: Costs
    fit: Fit | None = None
    start: tuple[float, Balance] | None = None


def search(
    shapes: Iterable[Shape],
    costs_of: Callable[[Shape], Costs],
    fit_of: Callable[[Shape], Fit],
    *,
    keep: int,
    cores: int | None = None,
    deadline: float = inf,
) -> Searched:
    """The best `keep` shapes, each with its best balance; `deadline` is a moment of `time.monotonic`."""
    queue, cannot = _by_their_bounds(shapes, costs_of, cores)
    answers: list[Answer] = []
    too_large, number = 0, len(queue)
    while queue and not (len(answers) >= keep and queue[0][0] >= answers[keep - 1].found.step_ms):
        if answers and time.monotonic() > deadline:
            cannot += len(queue)
            break
        bound, _, one = heappop(queue)
        spec = one.shape.spec(cores)
        if one.fit is None or one.start is None:
            fit = fit_of(one.shape)
            start = lowest(one.costs, spec, fit)
            if start is None:
                too_large += 1
            else:
                number += 1
                heappush(queue, (max(bound, start[0]), number, replace(one, fit=fit, start=start)))
            continue
        found = best_balance(one.costs, spec, one.fit, one.start, ACTIONS)
        answer = Answer(replace(one.shape, checkpoint=found.checkpoint), found)
        # Where what fits is the same everywhere, it is a shape of its own.
        if all(answer.shape != other.shape for other in answers):
            answers.append(answer)
            answers.sort(key=lambda answer: answer.found.step_ms)
    bounds = [one.found.lower_bound_ms for one in answers] + [bound for bound, *_ in queue[:1]]
    return Searched(answers[:keep], min(bounds, default=inf), too_large, cannot)


def _by_their_bounds(
    shapes: Iterable[Shape], costs_of: Callable[[Shape], Costs], cores: int | None
) -> tuple[list[tuple[float, int, _Waiting]], int]:
    """A heap of the shapes that can be simulated, and how many cannot."""
    queue = []
    cannot = 0
    for number, shape in enumerate(shapes):
        spec = shape.spec(cores)
        if can_be_simulated(spec):
            costs = costs_of(shape)
            queue.append((least_step(costs, spec), number, _Waiting(shape, costs)))
        else:
            cannot += 1
    heapify(queue)
    return queue, cannot
