"""Learning-rate schedules: pure functions of (step, total steps), so a resumed run needs no state of theirs.

To add one, write a function here and a YAML file in conf/lr_schedule. Each gives a factor for the optimizer's rate.
`warmup` counts steps (from 1) or, below 1, a fraction of the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, final

from gpipe_cli.errors import ConfigError


def _check(key: str, value: float, least: float = 0.0, most: float = math.inf) -> None:
    """A rate must not turn negative or stop moving because a number is out of its range."""
    if not least <= value <= most:
        limits = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ConfigError(f"lr_schedule.{key}={value}: must be {limits}")


class LrSchedule(Protocol):
    def factor(self, step: int, total: int) -> float:
        """What the rate is multiplied with at a step (0-based) of a run of `total` steps."""


def _half_cosine(begin: float, end: float, progress: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * progress)) / 2


def _warm(step: int, total: int, warmup: float) -> tuple[float, float]:
    """The warm-up factor, and how far (0 to 1) the part after it has come."""
    length = warmup * total if warmup < 1 else warmup
    rising = min(1.0, (step + 1) / (length + 1))
    return rising, max(0.0, (step - length) / max(1.0, total - 1 - length))


@final
@dataclass(frozen=True)
class Constant:
    warmup: float = 0

    def __post_init__(self) -> None:
        _check("warmup", self.warmup)

    def factor(self, step: int, total: int) -> float:
        return _warm(step, total, self.warmup)[0]


@final
@dataclass(frozen=True)
class Cosine:
    warmup: float = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check("warmup", self.warmup)
        _check("final", self.final)

    def factor(self, step: int, total: int) -> float:
        rising, progress = _warm(step, total, self.warmup)
        return rising * _half_cosine(1.0, self.final, min(1.0, progress))


@final
@dataclass(frozen=True)
class Linear:
    warmup: float = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check("warmup", self.warmup)
        _check("final", self.final)

    def factor(self, step: int, total: int) -> float:
        rising, progress = _warm(step, total, self.warmup)
        return rising * (1 + (self.final - 1) * min(1.0, progress))


@final
@dataclass(frozen=True)
class Step:
    milestones: list[float]
    drop: float = 0.1
    warmup: float = 0

    def __post_init__(self) -> None:
        for index, milestone in enumerate(self.milestones):
            if not isinstance(milestone, int | float):
                raise ConfigError(f"lr_schedule.milestones={self.milestones}: expected a list of numbers")
            _check(f"milestones[{index}]", milestone, most=1)
        _check("drop", self.drop)
        _check("warmup", self.warmup)

    def factor(self, step: int, total: int) -> float:
        passed = sum(step >= milestone * total for milestone in self.milestones)
        return float(_warm(step, total, self.warmup)[0] * self.drop**passed)


@final
@dataclass(frozen=True)
class OneCycle:
    rise: float = 0.3
    start: float = 0.04
    final: float = 0.0001

    def __post_init__(self) -> None:
        _check("rise", self.rise, most=1)
        _check("start", self.start)
        _check("final", self.final)

    def factor(self, step: int, total: int) -> float:
        top = max(1.0, self.rise * total - 1)
        if step <= top:
            return _half_cosine(self.start, 1.0, step / top)
        return _half_cosine(1.0, self.final, (step - top) / max(1.0, total - 1 - top))
