"""Weights from a file into a model.

Decides which files are read (safetensors, and torch's own format with code execution off) and what is said
when a file is missing, damaged or made for another model. Nothing is ever downloaded. The file knows nothing
of any model family: it compares names and shapes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.safe_files import open_regular

_SHOWN = 5  # names in a message; a wrong file differs in hundreds


def read_weights(path: str | Path, key: str = "model.weights") -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors`, `.pth` or `.pt` file by name, onto the CPU; key: where it was given."""
    path = Path(path)
    name = f"{key}={path}"
    readers = {".safetensors": _read_safetensors, ".pth": _read_torch, ".pt": _read_torch}
    if path.suffix not in readers:
        raise ConfigError(f"{name}: unknown kind of file; give one of {', '.join(readers)}")
    try:
        os.close(open_regular(path))
    except FileNotFoundError as error:
        raise RunError(f"{name}: no such file") from error
    except OSError as error:
        raise RunError(f"{name}: cannot be read: {error}") from error
    return readers[path.suffix](path, name)


def load_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], path: str | Path, key: str = "model.weights"
) -> None:
    """Load all of the model's tensors; the path is for the message when they are not exactly its own."""
    check_weights(model, tensors, path, key)
    model.load_state_dict(tensors)


def check_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], path: str | Path, key: str = "model.weights"
) -> None:
    """Whether they are the model's, by name, shape and kind of number; a precision may be another one."""
    expected = model.state_dict()
    misshapen = [
        f"{name} {_shape(tensors[name])} instead of {_shape(tensor)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    mistyped = [
        f"{name} {_dtype(tensors[name])} instead of {_dtype(tensor)}"
        for name, tensor in expected.items()
        if name in tensors and not _convertible(tensors[name].dtype, tensor.dtype)
    ]
    problems = {"of another shape": misshapen, "of another kind": mistyped}
    if not misshapen and not mistyped:
        problems = {
            "missing": [name for name in expected if name not in tensors],
            "unexpected": [name for name in tensors if name not in expected],
        }
    told = "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names)
    if told:
        raise ConfigError(f"{key}={path}: made for another model ({told})")


def _read_safetensors(path: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except MemoryError as error:
        raise ResourceError(f"{name}: no memory for its tensors") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{name}: damaged, or not a safetensors file ({error})") from error


def _read_torch(path: Path, name: str) -> dict[str, Tensor]:
    try:
        # Said aloud, because TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD turns the default into running the file's code.
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make torch.load raise nearly anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RunError(
            f"{name}: damaged, or holds more than tensors, which is not loaded ({reason})"
        ) from error
    if not isinstance(content, dict) or not all(_is_named_tensor(item) for item in content.items()):
        raise RunError(f"{name}: holds a {type(content).__name__}, but not of tensors by name")
    return content


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _convertible(given: torch.dtype, wanted: torch.dtype) -> bool:
    return given == wanted or (given.is_floating_point and wanted.is_floating_point)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
