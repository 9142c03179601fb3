"""The joint search: of all shapes and balances that fit, those with the shortest steps. Exact while time lasts.

Shapes are taken by their lower bounds, so that most are never looked into: once enough plans are better than a shape
can be, it is done with. Knows nothing of torch, and of costs and memory only that somebody has them for a shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import final

from gpipe_cli.plan.balances import Balance, Found, best_balance, lowest
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
    """Shapes that no balance makes fit."""
    left_out: int
    """Shapes that nobody can simulate, or for which there was no time."""

    @property
    def gap(self) -> float:
        """By how much the best plan may be beaten."""
        return self.answers[0].found.step_ms / self.lower_bound_ms - 1 if self.answers else inf


@final
@dataclass(frozen=True)
class _Waiting:
    shape: Shape
    costs: Costs
    fit: Fit
    start: tuple[float, Balance]


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
    waiting: list[_Waiting] = []
    too_large = left_out = 0
    for shape in shapes:
        course = shape.course(cores)
        if not can_be_simulated(course):
            left_out += 1
            continue
        costs, fit = costs_of(shape), fit_of(shape)
        start = lowest(costs, course, fit)
        if start is None:
            too_large += 1
        else:
            waiting.append(_Waiting(shape, costs, fit, start))
    waiting.sort(key=lambda one: one.start[0])
    answers, unseen = _judge(waiting, keep, cores, deadline)
    bounds = [one.found.lower_bound_ms for one in answers] + [one.start[0] for one in unseen]
    return Searched(answers[:keep], min(bounds, default=inf), too_large, left_out + len(unseen))


def _judge(
    waiting: list[_Waiting], keep: int, cores: int | None, deadline: float
) -> tuple[list[Answer], list[_Waiting]]:
    """All answers by their steps, and what there was no time for."""
    answers: list[Answer] = []
    for number, one in enumerate(waiting):
        if len(answers) >= keep and one.start[0] >= answers[keep - 1].found.step_ms:
            break  # and so are all that follow
        if answers and time.monotonic() > deadline:
            return answers, waiting[number:]
        found = best_balance(one.costs, one.shape.course(cores), one.fit, one.start, ACTIONS)
        answer = Answer(replace(one.shape, checkpoint=found.checkpoint), found)
        # Where what fits is the same everywhere, it is a shape of its own.
        if all(answer.shape != other.shape for other in answers):
            answers.append(answer)
        answers.sort(key=lambda answer: answer.found.step_ms)
    return answers, []
