"""Where training stood when a snapshot was taken: the part of it that is JSON.

Decides what is remembered besides tensors, and believes nothing it reads before its type is right. Keys of
randomness, order of samples and learning rate are functions of seed and step, so none of them is here.
"""

from __future__ import annotations

import math
import platform
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, final

import torch

from gpipe_cli.errors import RunError
from gpipe_cli.training.loop import Evaluated, Position
from gpipe_cli.version import VERSION

LARGEST_COUNT = 2**63 - 1
"""As for a seed, which is the largest of them."""
LONGEST = 1e10
"""Seconds: three hundred years."""


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    metric: str
    value: float
    step: int


@final
@dataclass(frozen=True)
class Record:
    position: Position
    best: Best | None
    steps_per_epoch: int
    seed: int
    threads: int
    versions: Mapping[str, str]
    numbers: Mapping[str, Any]
    """The engine's own."""

    def to_json(self) -> dict[str, Any]:
        epoch, batch = divmod(self.position.step, self.steps_per_epoch)
        return {
            "step": self.position.step,
            "epoch": epoch,
            "batch": batch,
            "steps_per_epoch": self.steps_per_epoch,
            "seconds": self.position.seconds,
            "evaluation": None if self.position.evaluation is None else asdict(self.position.evaluation),
            "best": None if self.best is None else asdict(self.best),
            "seed": self.seed,
            "threads": self.threads,
            "versions": dict(self.versions),
            "engine": dict(self.numbers),
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Record:
        try:
            evaluation = _record(Evaluated, content["evaluation"])
            position = Position(_count(content["step"]), _duration(content["seconds"]), evaluation)
            if evaluation is not None and evaluation.step > position.step:
                raise ValueError(f"evaluated at step {evaluation.step}, after step {position.step}")
            steps_per_epoch = _positive(content["steps_per_epoch"])
            if (content["epoch"], content["batch"]) != divmod(position.step, steps_per_epoch):
                raise ValueError(f"epoch and batch are not those of step {position.step}")
            return Record(
                position,
                _record(Best, content["best"]),
                steps_per_epoch,
                _count(content["seed"]),
                _count(content["threads"]),
                {name: _text(version) for name, version in _mapping(content["versions"]).items()},
                _mapping(content["engine"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"damaged: its record cannot be used: {type(error).__name__}: {error}") from error


def versions() -> dict[str, str]:
    """Of all that may change a bit."""
    return {"gpipe": VERSION, "torch": torch.__version__, "python": platform.python_version()}


def _record(kind: type[Any], content: Any) -> Any:
    """An Evaluated or a Best; fields are judged by name, else by type."""
    if content is None:
        return None
    read: dict[str, Callable[[Any], Any]] = {
        "str": _text,
        "int": _count,
        "float": _number,
        "dict[str, float]": _numbers,
        "samples": _positive,
        "took": _duration,
        "seconds": _duration,
        "loss": _finite,
        "lr": _finite,
    }
    given = {one.name: read.get(one.name, read[str(one.type)])(content[one.name]) for one in fields(kind)}
    return kind(**given)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise ValueError(f"{reprlib.repr(value)} is no count")
    return value


def _positive(value: Any) -> int:
    if _count(value) < 1:
        raise ValueError(f"{value} is less than 1")
    return int(value)


def _duration(value: Any) -> float:
    """Some of which add up to the time a run has taken, by which samples are divided."""
    if not 0 < (seconds := _number(value)) <= LONGEST:
        raise ValueError(f"{reprlib.repr(value)} is no number of seconds")
    return seconds


def _finite(value: Any) -> float:
    if not math.isfinite(number := _number(value)):
        raise ValueError(f"{value} is not finite")
    return number


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{reprlib.repr(value)} is no number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{reprlib.repr(value)} is no text")
    return value


def _numbers(value: Any) -> dict[str, float]:
    return {name: _number(one) for name, one in _mapping(value).items()}


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} is no mapping")
    return value
