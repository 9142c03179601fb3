"""What gpipe claims about its speed and memory, each as a bound on something measured in one run.

Only says which figure is compared with which bound; the figures come from `harness`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

from benchmarks.harness import Measured, ratio

Results = Mapping[str, Measured]
TIMED = ("resnet50", "transformer", "mlp")
ACTIONS = 2 * 2 * 8
"""Of one step: forward and backward, two partitions, eight micro-batches."""
BUSY = 8 / (8 + 2 - 1)
"""The share of a step in which two equal partitions have work: the last micro-batch begins when eight have."""
APART = "apart-2-threads"


@final
@dataclass(frozen=True)
class Claim:
    text: str
    cases: tuple[str, ...]
    systems: tuple[str, ...]
    """Those the figure is made of; without one of them the claim is not judged."""
    figure: Callable[..., float]
    bound: float
    at_most: bool = True
    possible: Callable[[Results], float | None] = lambda results: None
    """What the machine allowed at most in the same run, where that was measured."""


@final
@dataclass(frozen=True)
class Judged:
    text: str
    figure: float
    best: float
    """The same of each system's fastest turn: what is left when nothing else disturbs the machine."""
    bound: str
    holds: bool
    """Judged by the medians."""
    possible: float | None


def judge(case: str, results: Results) -> list[Judged]:
    """Every claim about the case for which all systems were measured."""
    return [
        _judge_one(claim, [results[system] for system in claim.systems], claim.possible(results))
        for claim in CLAIMS
        if case in claim.cases
        and all(system in results and results[system].seconds for system in claim.systems)
    ]


def _judge_one(claim: Claim, measured: list[Measured], possible: float | None) -> Judged:
    figure = claim.figure(*measured)
    holds = figure <= claim.bound if claim.at_most else figure >= claim.bound
    best = claim.figure(*(replace(one, seconds=[one.best]) for one in measured))
    bound = f"{'≤' if claim.at_most else '≥'} {claim.bound:g}"
    return Judged(claim.text, figure, best, bound, holds, possible)


def _time(system: str, other: str, bound: float) -> Claim:
    return Claim(f"time of {system} / {other}", TIMED, (system, other), ratio, bound)


def _speed_up(system: str) -> Claim:
    def possible(results: Results) -> float | None:
        """Two threads that never wait for each other, and the bubble that both schedules have."""
        apart = results.get(APART)
        return BUSY * ratio(results["plain"], apart) if apart is not None and apart.seconds else None

    text = f"speed-up of {system} over plain, same chunks, one thread"
    return Claim(text, TIMED, ("plain", system), ratio, 1.55, at_most=False, possible=possible)


def _overhead(system: str) -> Claim:
    def own_microseconds(measured: Measured, plain: Measured) -> float:
        # What plain takes for the same step is the work of the loss and of autograd.
        return (measured.median - plain.median) / ACTIONS * 1e6

    text = f"microseconds per action of {system} beyond plain, empty layers"
    return Claim(text, ("empty",), (system, "plain"), own_microseconds, 100)


CLAIMS = (
    _time("gpipe", "torchgpipe", 0.65),
    _time("gpipe-except_last", "torchgpipe-except_last", 0.70),
    _time("gpipe", "torch-gpipe", 1.0),
    _time("1f1b", "torch-1f1b", 1.0),
    _time("gpipe-recorded", "gpipe", 1.02),
    _speed_up("gpipe"),
    _speed_up("1f1b"),
    Claim(
        "peak memory of 1f1b / gpipe, whole process",
        ("transformer",),
        ("1f1b", "gpipe"),
        lambda one, other: one.memory / other.memory,
        0.6,
    ),
    _overhead("gpipe"),
    _overhead("1f1b"),
)
