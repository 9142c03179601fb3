"""What a model needs besides its weights to make predictions: how its inputs are prepared, and what its outputs mean.

Training writes it to the run directory; `gpipe export` puts it into the file of weights and into a JSON file beside it.
A file may come from anywhere, so every value is checked, and the components that it names must be allowed as those of
any configuration.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli import __version__
from gpipe_cli.build.loader import BatchLoader, data_arguments
from gpipe_cli.build.step import make_loss
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.config.targets import REMOVED_TABLES, with_current_names
from gpipe_cli.data.datasets import Data
from gpipe_cli.data.texts import make_tokenizer
from gpipe_cli.data.tokenizer import ByteTokenizer, FileTokenizer
from gpipe_cli.data.transforms import Normalize
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.losses.dice import Dice
from gpipe_cli.losses.mse import MeanSquaredError
from gpipe_cli.pytree import ModelInput
from gpipe_cli.runs.directory import write_text
from gpipe_cli.safe_files import parse_json, read_regular, redacted
from gpipe_cli.tensor_files.tensor_file import BadTensors, TensorFile

SPEC_FILE = "inference.json"
METADATA_KEY = "gpipe"
"""Among the metadata of a safetensors file."""
MAX_SPEC_BYTES = 2**24
MAX_INPUT_NUMBERS = 2**28
MAX_DIMENSIONS = 8
MAX_CLASSES = 2**24
CLASSIFICATION, SEGMENTATION, REGRESSION, OTHER = "classification", "segmentation", "regression", "other"
COMPONENTS = ("model", "transform", "loss")
LOADING_KEYS = ("weights", "new_head")
"""Keys of a model that name a file to begin with; the trained weights replace it."""


@final
@dataclass(frozen=True)
class InferenceSpec:
    task: str
    """What targets are: one class per sample, one per pixel, numbers, or something that `gpipe predict` cannot show."""
    classes: int
    class_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    """The shape of one input."""
    mean: tuple[float, ...] | None
    """What the evaluation transform subtracts from each channel; None if it does not normalize. For a custom
    transform, the mean of the data."""
    std: tuple[float, ...] | None
    target_shape: tuple[int, ...]
    model: dict[str, Any]
    """With its `_target_`, as in a configuration; so are the other two components."""
    transform: dict[str, Any]
    loss: dict[str, Any]
    text: dict[str, Any] | None = None
    """Of a classifier of texts: the keys of its data that say how a row becomes an input."""
    gpipe: str = __version__
    """The version that wrote it."""

    @staticmethod
    def of(settings: ModelConfig, loader: BatchLoader) -> InferenceSpec:
        data, transform = loader.data, loader.transforms.test
        # A transform of the user's own may compute with the statistics of the data.
        statistics = transform if isinstance(transform, Normalize) else None if transform is None else data
        input, target = data.train[0]
        target = torch.as_tensor(target)
        named = data.class_names is not None and len(data.class_names) == loader.classes
        return InferenceSpec(
            task=_task(settings, data, input, target),
            classes=loader.classes,
            class_names=data.class_names if named else None,
            shape=data.shape,
            mean=None if statistics is None else statistics.mean,
            std=None if statistics is None else statistics.std,
            target_shape=tuple(target.shape),
            model={key: value for key, value in settings.model.items() if key not in LOADING_KEYS},
            transform=dict(settings.transform),
            loss=dict(settings.loss),
            text=_text_keys(settings, data),
        )

    def to_text(self) -> str:
        """As JSON, without secrets from environment variables."""
        return redacted(json.dumps(asdict(self), indent=1))

    @staticmethod
    def from_text(text: str | bytes) -> InferenceSpec:
        """Raise ValueError unless every value is one that `to_text` writes."""
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError("it is not a mapping")
        content.setdefault("text", None)  # earlier versions had no classifiers of texts
        missing = [name for name in InferenceSpec.__dataclass_fields__ if name not in content]
        if missing:
            raise ValueError(f"it lacks '{missing[0]}'")
        shape, classes = _sizes(content, "shape"), content["classes"]
        if type(classes) is not int or not 1 <= classes <= MAX_CLASSES:
            raise ValueError(f"classes={reprlib.repr(classes)} is not a number of classes")
        names = content["class_names"]
        if names is not None and not (_is_list_of(names, str) and len(names) == classes):
            raise ValueError(f"class_names={reprlib.repr(names)} are not the names of {classes} classes")
        if content.get("feature_names") is not None:  # earlier versions wrote the columns of a table
            raise ConfigError(REMOVED_TABLES)
        for name in ("task", "gpipe"):
            if not isinstance(content[name], str):
                raise ValueError(f"{name}={reprlib.repr(content[name])} is not text")
        for name in COMPONENTS:
            if not isinstance(content[name], dict):
                raise ValueError(f"{name}={reprlib.repr(content[name])} is not a mapping")
        return InferenceSpec(
            task=content["task"],
            classes=classes,
            class_names=None if names is None else tuple(names),
            shape=shape,
            mean=_statistics(content, "mean", shape),
            std=_statistics(content, "std", shape),
            target_shape=_sizes(content, "target_shape"),
            **{name: with_current_names(content[name]) for name in COMPONENTS},
            text=_checked_text(content["text"]),
            gpipe=content["gpipe"],
        )

    def data(self) -> Data:
        """Data with a sample of zeros, which stands for the data that the model was trained with."""
        dtype = torch.float32 if self.task in (REGRESSION, OTHER) else torch.int64
        samples = _Zeros(self.shape, self.target_shape, dtype, is_text=self.text is not None)
        return Data(
            samples,
            samples,
            classes=self.classes,
            shape=self.shape,
            mean=self.mean,
            std=self.std,
            class_names=self.class_names,
            tokenizer=self.tokenizer,
        )

    @cached_property
    def tokenizer(self) -> FileTokenizer | ByteTokenizer | None:
        return None if self.text is None else make_tokenizer(self.text["tokenizer"], self.text["eos_token"])


@final
@dataclass(frozen=True)
class _Zeros:
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    target_dtype: torch.dtype
    is_text: bool

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[ModelInput, Tensor]:
        target = torch.zeros(self.target_shape, dtype=self.target_dtype)
        if not self.is_text:
            return torch.zeros(self.input_shape), target
        tokens = torch.zeros(self.input_shape, dtype=torch.int64)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, target


def write_spec(run: Path, settings: ModelConfig, loader: BatchLoader) -> None:
    write_text(run / SPEC_FILE, f"{InferenceSpec.of(settings, loader).to_text()}\n")


def spec_of_run(run: Path) -> InferenceSpec | None:
    """None for a run of a gpipe that did not write it yet."""
    path = run / SPEC_FILE
    try:
        return InferenceSpec.from_text(read_regular(path, MAX_SPEC_BYTES, base=run))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged: {error}") from error


def spec_of_weights(weights: str) -> InferenceSpec | None:
    """None for a file that gpipe did not export."""
    path = Path(weights)
    if path.suffix != ".safetensors":
        return None
    try:
        text = TensorFile(path).metadata.get(METADATA_KEY)
        if text is not None and len(text) > MAX_SPEC_BYTES:
            raise ValueError(
                f"its metadata has {len(text):,} characters; gpipe reads at most {MAX_SPEC_BYTES:,}"
            )
        return None if text is None else InferenceSpec.from_text(text)
    except FileNotFoundError as error:
        raise RunError(f"weights={weights}: no such file") from error
    except (BadTensors, OSError) as error:
        raise RunError(f"weights={weights}: damaged, or not a safetensors file ({error})") from error
    except ValueError as error:
        raise RunError(f"weights={weights}: its metadata cannot be used: {error}") from error


def _task(settings: ModelConfig, data: Data, input: Any, target: Tensor) -> str:
    if _text_keys(settings, data) is not None:
        return CLASSIFICATION
    if data.tokenizer is not None or not isinstance(input, Tensor):
        return OTHER
    loss = make_loss(settings)
    if isinstance(loss, MeanSquaredError):
        return REGRESSION
    if isinstance(loss, Dice):
        return SEGMENTATION
    if target.is_floating_point():
        # Cross entropy also takes the probability of each class.
        return CLASSIFICATION if target.shape == (data.classes,) and data.classes > 1 else REGRESSION
    return {0: CLASSIFICATION, 2: SEGMENTATION}.get(target.ndim, OTHER)


def _text_keys(settings: ModelConfig, data: Data) -> dict[str, Any] | None:
    if data.tokenizer is None or data.class_names is None or "field" not in settings.data:
        return None
    keys = data_arguments(settings)
    path = keys["tokenizer"]
    return {
        "tokenizer": None if path is None else str(Path(path).absolute()),
        **{name: keys[name] for name in ("eos_token", "field")},
    }


def _checked_text(keys: Any) -> dict[str, Any] | None:
    match keys:
        case None | {"tokenizer": str() | None, "eos_token": str() | None, "field": str()}:
            return keys
    raise ValueError(f"text={reprlib.repr(keys)} does not say how texts become inputs")


def _is_list_of(values: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value in values
    )


def _sizes(content: Mapping[str, Any], name: str) -> tuple[int, ...]:
    sizes = content[name]
    if (
        not _is_list_of(sizes, int)
        or len(sizes) > MAX_DIMENSIONS
        or not all(0 < size <= MAX_INPUT_NUMBERS for size in sizes)
        or math.prod(sizes) > MAX_INPUT_NUMBERS
    ):
        raise ValueError(
            f"{name}={reprlib.repr(sizes)} is not a shape of at most {MAX_INPUT_NUMBERS:,} numbers"
        )
    return tuple(sizes)


def _statistics(content: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> tuple[float, ...] | None:
    """The mean or std of each channel."""
    values = content[name]
    if values is None:
        return None
    if (
        not _is_list_of(values, (int, float))
        or not all(math.isfinite(value) and (value > 0 or name == "mean") for value in values)
        or (len(values),) != shape[:1]
    ):
        raise ValueError(f"{name}={reprlib.repr(values)} does not fit inputs of the shape {list(shape)}")
    return tuple(map(float, values))
