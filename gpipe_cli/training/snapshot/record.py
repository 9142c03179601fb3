"""Where training stood when a snapshot was taken: the part of it that is JSON.

Decides what is remembered besides tensors, and believes nothing it reads before its type is right. Keys of
randomness, order of samples and learning rate are functions of seed and step, so none of them is here.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, final

import torch

from gpipe_cli.errors import RunError
from gpipe_cli.training.loop import Evaluated, Position
from gpipe_cli.version import VERSION


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
            position = Position(_count(content["step"]), _number(content["seconds"]), evaluation)
            return Record(
                position,
                _record(Best, content["best"]),
                max(1, _count(content["steps_per_epoch"])),
                _count(content["seed"]),
                _count(content["threads"]),
                {str(name): str(version) for name, version in dict(content["versions"]).items()},
                dict(content["engine"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"damaged: its record cannot be used: {type(error).__name__}: {error}") from error


def versions() -> dict[str, str]:
    """Of all that may change a bit."""
    return {"gpipe": VERSION, "torch": torch.__version__, "python": platform.python_version()}


def _record(kind: type[Any], content: Any) -> Any:
    """An Evaluated or a Best, whose fields are text, whole numbers, numbers and `means`."""
    if content is None:
        return None
    read = {"str": _text, "int": _count, "float": _number, "dict[str, float]": _numbers}
    return kind(**{one.name: read[str(one.type)](content[one.name]) for one in fields(kind)})


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _numbers(value: Any) -> dict[str, float]:
    return {_text(name): _number(one) for name, one in dict(value).items()}
