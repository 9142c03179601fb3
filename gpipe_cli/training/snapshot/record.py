"""The JSON part of a snapshot: where training stood.

Random keys, the order of samples and the learning rate are functions of seed and step, so none of them is stored.
"""

from __future__ import annotations

import math
import platform
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, final

import torch

from gpipe_cli import __version__
from gpipe_cli.errors import RunError
from gpipe_cli.training.early_stop import Waiting
from gpipe_cli.training.loop import EvalResult, LossWindow, Position
from gpipe_cli.training.snapshot.base_files import BaseFiles

MAX_COUNT = 2**63 - 1
"""Seeds go that far."""
MAX_SECONDS = 1e10
"""Three hundred years."""


@final
@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation of the run up to now."""

    metric: str
    value: float
    step: int


@final
@dataclass(frozen=True)
class TrainingRecord:
    position: Position
    best: BestEvaluation | None
    steps_per_epoch: int
    seed: int
    threads: int
    versions: Mapping[str, str]
    numbers: Mapping[str, Any]
    """What the engine saves besides tensors."""
    base: BaseFiles | None = None
    """The files that hold what the snapshot leaves out."""
    waiting: Waiting | None = None
    """With early stopping."""

    def to_json(self) -> dict[str, Any]:
        epoch, batch = divmod(self.position.step, self.steps_per_epoch)
        return {
            "step": self.position.step,
            "epoch": epoch,
            "batch": batch,
            "steps_per_epoch": self.steps_per_epoch,
            "seconds": self.position.seconds,
            "evaluation": None if self.position.evaluation is None else asdict(self.position.evaluation),
            "window": asdict(self.position.window),
            "best": None if self.best is None else asdict(self.best),
            "seed": self.seed,
            "threads": self.threads,
            "versions": dict(self.versions),
            "engine": dict(self.numbers),
            **({} if self.base is None else {"base": self.base.to_json()}),
            **({} if self.waiting is None else {"waiting": asdict(self.waiting)}),
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> TrainingRecord:
        """Check the type and range of every value: the file may come from anywhere."""
        try:
            evaluation = _parse_dataclass(EvalResult, content["evaluation"])
            # Snapshots of older versions have no window.
            window = _parse_dataclass(LossWindow, content.get("window")) or LossWindow()
            position = Position(_count(content["step"]), _duration(content["seconds"]), evaluation, window)
            if evaluation is not None and evaluation.step > position.step:
                raise ValueError(f"evaluated at step {evaluation.step}, after step {position.step}")
            steps_per_epoch = _positive(content["steps_per_epoch"])
            if (content["epoch"], content["batch"]) != divmod(position.step, steps_per_epoch):
                raise ValueError(f"epoch and batch do not match step {position.step}")
            return TrainingRecord(
                position,
                _parse_dataclass(BestEvaluation, content["best"]),
                steps_per_epoch,
                _count(content["seed"]),
                _count(content["threads"]),
                {name: _text(version) for name, version in _mapping(content["versions"]).items()},
                _mapping(content["engine"]),
                BaseFiles.from_json(content["base"]) if "base" in content else None,
                _parse_dataclass(Waiting, content.get("waiting")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"damaged: its record cannot be used: {type(error).__name__}: {error}") from error


def versions() -> dict[str, str]:
    """The versions of everything that can change a bit."""
    return {"gpipe": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _parse_dataclass(kind: type[Any], content: Any) -> Any:
    """A result as its dataclass; the parser of a field is chosen by its name, else by its type."""
    if content is None:
        return None
    parsers: dict[str, Callable[[Any], Any]] = {
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
    return kind(
        **{
            field.name: parsers.get(field.name, parsers[str(field.type)])(content[field.name])
            for field in fields(kind)
        }
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{reprlib.repr(value)} is not a count")
    return value


def _positive(value: Any) -> int:
    if _count(value) < 1:
        raise ValueError(f"{value} is less than 1")
    return int(value)


def _duration(value: Any) -> float:
    """Never 0: samples are divided by durations."""
    if not 0 < (seconds := _number(value)) <= MAX_SECONDS:
        raise ValueError(f"{reprlib.repr(value)} is not a number of seconds")
    return seconds


def _finite(value: Any) -> float:
    if not math.isfinite(number := _number(value)):
        raise ValueError(f"{value} is not finite")
    return number


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{reprlib.repr(value)} is not a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{reprlib.repr(value)} is not text")
    return value


def _numbers(value: Any) -> dict[str, float]:
    return {name: _number(number) for name, number in _mapping(value).items()}


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} is not a mapping")
    return value
