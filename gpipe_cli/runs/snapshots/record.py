"""The JSON part of a snapshot: where training stood, and which files of a base model hold its frozen parameters,
which stay in these files.

Random keys, the order of samples and the learning rate are functions of seed and step, so none of them is stored.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from gpipe_cli import __version__
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.errors import RunError
from gpipe_cli.huggingface import CONFIG
from gpipe_cli.runs.snapshots.durable import FileDigest
from gpipe_cli.runs.snapshots.manifest import VerifiedSnapshot
from gpipe_cli.sequential.deferred import DeferredParameter
from gpipe_cli.training.loop import EvalResult, LossWindow, PatienceState, Position

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
    patience: PatienceState | None = None
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
            **({} if self.patience is None else {"waiting": asdict(self.patience)}),
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
                _parse_dataclass(PatienceState, content.get("waiting")),
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


@final
@dataclass(frozen=True)
class BaseFiles:
    """The files of a base model: a snapshot refers to them, by size and digest, instead of holding frozen parameters.

    A run and the commands that read its snapshots name the directory of these files (`model.path`). Wherever it is,
    its files must be those that the run was trained with.
    """

    directory: str
    """As the run's configuration names it."""
    files: Mapping[str, FileDigest]
    """By their names in the directory."""

    def to_json(self) -> dict[str, Any]:
        files = {name: asdict(digest) for name, digest in sorted(self.files.items())}
        return {"directory": self.directory, "files": files}

    @staticmethod
    def from_json(content: Any) -> BaseFiles:
        """Raise ValueError unless it has the form that `to_json` gives."""
        match content:
            case {"directory": str(directory), "files": dict(files)} if files:
                return BaseFiles(directory, {name: _digest(name, entry) for name, entry in files.items()})
        raise ValueError(f"{reprlib.repr(content)} does not describe the files of a base model")

    def check(self, directory: Path, *, contents: bool = True) -> None:
        """Raise RunError unless the directory has these files.

        contents: compare digests, which reads the files; otherwise only sizes.
        """
        for name, expected in self.files.items():
            path = directory / name
            try:
                size = path.stat().st_size
                same = size == expected.size and (not contents or _sha256(path) == expected.sha256)
            except OSError as error:
                raise RunError(
                    f"needs the base model it was trained on, but {path} cannot be read ({error.strerror}); "
                    "give model.path=<directory> if the base model has moved"
                ) from error
            if not same:
                reason = (
                    "content" if size == expected.size else f"{size:,} instead of {expected.size:,} bytes"
                )
                raise RunError(
                    f"was trained on another base model: {path} has changed ({reason}); "
                    "give model.path=<directory> with the files that the run began with"
                )


def digest_files(directory: Path, names: Iterable[str]) -> BaseFiles:
    """Read the files once. Raises RunError if one cannot be read."""
    digests = {}
    for name in sorted(names):
        path = directory / name
        try:
            digests[name] = FileDigest(path.stat().st_size, _sha256(path))
        except OSError as error:
            raise RunError(f"{path}: a file of the base model cannot be read: {error.strerror}") from error
    return BaseFiles(str(directory), digests)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(name: str, entry: Any) -> FileDigest:
    match entry:
        case {"size": int(size), "sha256": str(digest)} if name and os.sep not in name and name != os.pardir:
            return FileDigest(size, digest)
    raise ValueError(f"{reprlib.repr(name)}: {reprlib.repr(entry)} does not describe a file of a base model")


@final
@dataclass
class BaseWeights:
    directory: Path
    """`model.path`."""
    files: frozenset[str]
    """The names, in the directory, of the files that these parameters depend on."""
    parameters: frozenset[str]
    """By all their names in a state_dict."""
    verified: BaseFiles | None = None
    """What a snapshot says of the files, if the run resumes from one."""

    def digests(self) -> BaseFiles:
        """Read all files, unless a snapshot was compared with them."""
        if self.verified is not None:
            return BaseFiles(str(self.directory), self.verified.files)
        return digest_files(self.directory, self.files)


def base_weights(settings: ModelConfig, model: nn.Module) -> BaseWeights | None:
    """The base weights of a model that loads frozen parameters later; None if it has no such parameters."""
    frozen = {
        name: parameter
        for name, parameter in model.state_dict(keep_vars=True).items()
        if isinstance(parameter, DeferredParameter) and not parameter.requires_grad
    }
    if not frozen or "path" not in settings.model:
        return None
    directory = Path(settings.model["path"])
    files = {file.name for parameter in frozen.values() for file in parameter.files}
    # What the layers compute with these parameters depends on the configuration.
    return BaseWeights(directory, frozenset({CONFIG, *files}), frozenset(frozen))


def check_base(base: BaseFiles | None, model: Mapping[str, Any], snapshot: Path, *, contents: bool) -> None:
    """Raise RunError unless `model.path` has the files that the snapshot refers to.

    model: the keys of the model.
    contents: compare digests, which reads the files; otherwise only sizes.
    """
    if base is not None:
        try:
            base.check(Path(model.get("path", base.directory)), contents=contents)
        except RunError as error:
            raise RunError(f"{snapshot}: {error}") from error


def base_of_snapshot(snapshot: VerifiedSnapshot) -> BaseFiles | None:
    if "base" not in snapshot.manifest.record:
        return None
    try:
        return BaseFiles.from_json(snapshot.manifest.record["base"])
    except ValueError as error:
        raise RunError(f"{snapshot.path}: damaged: {error}") from error
