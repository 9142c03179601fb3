"""The claims that gpipe makes about its speed and memory, each a bound on a figure measured in one run.

This module only says which figure is compared with which bound; `harness` measures the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

from benchmarks.harness import SystemResult, ratio

Results = Mapping[str, SystemResult]
TIMED = ("resnet50", "transformer", "mlp")
ACTIONS = 2 * 2 * 8
"""Actions of one step: forward and backward, two partitions, eight micro-batches."""
BUSY = 8 / (8 + 2 - 1)
"""The share of a step in which each of two equal partitions is busy; the rest is the pipeline bubble."""
APART = "apart-2-threads"


@final
@dataclass(frozen=True)
class Claim:
    text: str
    cases: tuple[str, ...]
    systems: tuple[str, ...]
    """The systems that `figure` takes; if one of them was not measured, the claim is not judged."""
    figure: Callable[..., float]
    bound: float
    at_most: bool = True
    possible: Callable[[Results], float | None] = lambda results: None
    """The best figure that the machine allowed in the same run, if it was measured."""


@final
@dataclass(frozen=True)
class Verdict:
    text: str
    figure: float
    best: float
    """The same figure from each system's fastest turn, which other load disturbs least."""
    bound: str
    holds: bool
    """Whether the median figure is within the bound."""
    possible: float | None


def judge(case: str, results: Results) -> list[Verdict]:
    """Judge every claim about the case whose systems were all measured."""
    return [
        _verdict(claim, [results[system] for system in claim.systems], claim.possible(results))
        for claim in CLAIMS
        if case in claim.cases
        and all(system in results and results[system].seconds for system in claim.systems)
    ]


def _verdict(claim: Claim, results: list[SystemResult], possible: float | None) -> Verdict:
    figure = claim.figure(*results)
    holds = figure <= claim.bound if claim.at_most else figure >= claim.bound
    best = claim.figure(*(replace(result, seconds=[result.best]) for result in results))
    bound = f"{'≤' if claim.at_most else '≥'} {claim.bound:g}"
    return Verdict(claim.text, figure, best, bound, holds, possible)


def _time(system: str, baseline: str, bound: float) -> Claim:
    return Claim(f"time of {system} / {baseline}", TIMED, (system, baseline), ratio, bound)


def _speed_up(system: str) -> Claim:
    def possible(results: Results) -> float | None:
        """The speed-up of two threads that never wait, times the share of the step outside the bubble."""
        apart = results.get(APART)
        return BUSY * ratio(results["plain"], apart) if apart is not None and apart.seconds else None

    text = f"speed-up of {system} over plain, same chunks, one thread"
    return Claim(text, TIMED, ("plain", system), ratio, 1.55, at_most=False, possible=possible)


def _overhead(system: str) -> Claim:
    def own_microseconds(result: SystemResult, plain: SystemResult) -> float:
        # The plain step contains the same work of the loss and of autograd.
        return (result.median - plain.median) / ACTIONS * 1e6

    text = f"microseconds per action of {system} beyond plain, empty layers"
    return Claim(text, ("empty",), (system, "plain"), own_microseconds, 100)


CLAIMS = (
    _time("gpipe", "torchgpipe", 0.65),
    _time("gpipe-except_last", "torchgpipe-except_last", 0.70),
    _time("gpipe", "torch-gpipe", 1.0),
    _time("1f1b", "torch-1f1b", 1.0),
    _time("gpipe-recorded", "gpipe", 1.02),
    _time("auto", "1f1b", 1.0),
    _time("auto", "zero_bubble", 1.0),
    _speed_up("gpipe"),
    _speed_up("1f1b"),
    Claim(
        "speed-up of gpipe over naive placement",
        ("llama",),
        ("naive", "gpipe"),
        ratio,
        1.5,
        at_most=False,
    ),
    Claim(
        "peak memory of 1f1b / gpipe, whole process",
        ("transformer",),
        ("1f1b", "gpipe"),
        lambda result, baseline: result.memory / baseline.memory,
        0.6,
    ),
    _overhead("gpipe"),
    _overhead("1f1b"),
)
