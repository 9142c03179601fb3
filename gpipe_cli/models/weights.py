"""Load weights from a file into a model: safetensors, or torch's own format with code execution off.

gpipe downloads nothing. A file must match the model in names, shapes and kinds of numbers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.safe_files import open_regular

_MAX_NAMES = 5  # in a message; a wrong file differs in hundreds of names


def read_weights(path: str | Path, key: str = "model.weights") -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors`, `.pth` or `.pt` file onto the CPU; `key` names the setting in errors."""
    path = Path(path)
    name = f"{key}={path}"
    readers = {".safetensors": _read_safetensors, ".pth": _read_torch, ".pt": _read_torch}
    if path.suffix not in readers:
        raise ConfigError(f"{name}: unknown file type; give one of {', '.join(readers)}")
    try:
        os.close(open_regular(path))
    except FileNotFoundError as error:
        raise RunError(f"{name}: no such file") from error
    except OSError as error:
        raise RunError(f"{name}: cannot be read: {error}") from error
    return readers[path.suffix](path, name)


def load_weights(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    path: str | Path,
    key: str = "model.weights",
    *,
    head: Sequence[str] = (),
    new_head: bool = False,
) -> None:
    """Load all of the model's tensors; `path` and `key` are for the error if they do not match.

    head: the paths of the modules that score classes.
    new_head: let these keep their values, whatever the file has for them.
    """

    def is_in_head(name: str) -> bool:
        return name.startswith(tuple(f"{module}." for module in head))

    expected = model.state_dict()
    if new_head:
        kept = {name: tensor for name, tensor in expected.items() if is_in_head(name)}
        tensors = {**{name: tensor for name, tensor in tensors.items() if not is_in_head(name)}, **kept}
    misshapen = _misshapen(expected, tensors)
    if misshapen and all(map(is_in_head, misshapen)):
        raise head_refusal(f"{key}={path}", misshapen)
    check_weights(model, tensors, path, key)
    with warnings.catch_warnings():
        # A parameter without storage has nothing to copy to: it is only compared.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter", UserWarning)
        model.load_state_dict(tensors)


def check_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], path: str | Path, key: str = "model.weights"
) -> None:
    """Check names, shapes and kinds of numbers; the floating-point precision may differ."""
    expected = model.state_dict()
    misshapen = list(_misshapen(expected, tensors).values())
    mistyped = [
        f"{name} {_dtype(tensors[name])} instead of {_dtype(tensor)}"
        for name, tensor in expected.items()
        if name in tensors and not _convertible(tensors[name].dtype, tensor.dtype)
    ]
    problems = {"with another shape": misshapen, "with another dtype": mistyped}
    if not misshapen and not mistyped:
        problems = {
            "missing": [name for name in expected if name not in tensors],
            "unexpected": [name for name in tensors if name not in expected],
        }
    summary = "; ".join(
        f"{len(names)} {problem}: {listed(names)}" for problem, names in problems.items() if names
    )
    if summary:
        raise ConfigError(f"{key}={path}: made for another model ({summary})")


def head_refusal(name: str, misshapen: Mapping[str, str]) -> ConfigError:
    """The error about weights that fit a model except for its head; `misshapen` describes the tensors of the head."""
    return ConfigError(
        f"{name}: its head has another size ({listed(list(misshapen.values()))}); give model.new_head=true to "
        "replace it by one for the classes of the data, or the model.num_classes that it was trained with"
    )


def _misshapen(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: f"{name} {shape_text(given[name].shape)} instead of {shape_text(tensor.shape)}"
        for name, tensor in expected.items()
        if name in given and given[name].shape != tensor.shape
    }


def _read_safetensors(path: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except MemoryError as error:
        raise ResourceError(f"{name}: not enough memory for its tensors") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{name}: damaged, or not a safetensors file ({error})") from error


def _read_torch(path: Path, name: str) -> dict[str, Tensor]:
    try:
        # Explicit, because TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD changes the default to running the file's code.
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # on damaged bytes torch.load may raise nearly anything, and advises to run code
        raise RunError(
            f"{name}: damaged, or contains more than tensors, which gpipe does not load"
        ) from error
    if not isinstance(content, dict) or not all(_is_named_tensor(item) for item in content.items()):
        raise RunError(f"{name}: contains a {type(content).__name__} instead of a dict of tensors by name")
    return content


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _convertible(given: torch.dtype, expected: torch.dtype) -> bool:
    return given == expected or (given.is_floating_point and expected.is_floating_point)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def listed(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
