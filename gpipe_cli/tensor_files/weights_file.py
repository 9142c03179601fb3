"""Read a file of weights: safetensors, or torch's own format with code execution off.

gpipe downloads nothing. A training framework's checkpoint may hold the tensors below a key, next to numbers and other
states: `{"epoch": 3, "state_dict": {...}, "optimizer": {...}}`.
"""

from __future__ import annotations

import argparse
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.safe_files import open_regular

StateDicts = dict[str, dict[str, Tensor]]
"""By the dotted key at which the file has each; "" is the file itself."""
_MAX_DEPTH = 3
"""How deep dicts may be nested for their tensors to be found."""


def read_weights(path: str | Path, key: str = "model.weights") -> StateDicts:
    """Read the tensors of a `.safetensors`, `.pth` or `.pt` file onto the CPU; `key` names the setting in errors."""
    path = Path(path)
    name = f"{key}={path}"
    readers = {".safetensors": _read_safetensors, ".pth": _read_torch, ".pt": _read_torch}
    if path.is_dir():
        raise ConfigError(
            f"{name}: is a directory; give a file, which gpipe export run=<directory> makes of a run"
        )
    if path.suffix not in readers:
        raise ConfigError(f"{name}: unknown file type; give one of {', '.join(readers)}")
    try:
        os.close(open_regular(path))
    except FileNotFoundError as error:
        raise RunError(f"{name}: no such file") from error
    except OSError as error:
        raise RunError(f"{name}: cannot be read: {error}") from error
    content = readers[path.suffix](path, name)
    found = dict(_state_dicts(content, "", _MAX_DEPTH))
    if not found:
        raise RunError(f"{name}: contains a {type(content).__name__} without tensors by name")
    return found


def _state_dicts(content: Any, place: str, depth: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    if not isinstance(content, Mapping) or not depth:
        return
    if tensors := {name: value for name, value in content.items() if _is_named_tensor(name, value)}:
        yield place, tensors
    for key, value in content.items():
        if isinstance(key, str):
            yield from _state_dicts(value, f"{place}.{key}".removeprefix("."), depth - 1)


def _is_named_tensor(name: Any, value: Any) -> bool:
    """A sparse or quantized tensor, or one without values, cannot become a parameter's."""
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized
    return isinstance(name, str) and is_plain and not value.is_meta


def _read_safetensors(path: Path, name: str) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except MemoryError as error:
        raise ResourceError(f"{name}: not enough memory for its tensors") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{name}: damaged, or not a safetensors file ({error})") from error


def _read_torch(path: Path, name: str) -> Any:
    is_zip = _is_uncompressed_zip(path, name)
    try:
        # Namespace, which holds only attributes, is how scripts save their command line next to the weights.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            # Explicit, because TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD changes the default to running the file's code.
            # A mapped file needs no memory for tensors that are left out, whatever sizes it claims.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except MemoryError as error:
        raise ResourceError(f"{name}: not enough memory for its tensors") from error
    except (
        Exception
    ) as error:  # on damaged bytes torch.load may raise nearly anything, and advises to run code
        classes = _other_classes(path) if is_zip else []
        if classes:
            raise RunError(
                f"{name}: contains {', '.join(classes[:3])}, and gpipe loads only tensors and plain values; save the "
                "model's state_dict alone"
            ) from error
        raise RunError(
            f"{name}: damaged, or contains more than tensors, which gpipe does not load"
        ) from error


def _is_uncompressed_zip(path: Path, name: str) -> bool:
    """Whether torch can map the file into memory; False for the format of old versions."""
    try:
        with zipfile.ZipFile(path) as file:
            entries = file.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False
    # torch compresses nothing, and mapped bytes must be those of the tensors.
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise RunError(f"{name}: damaged: it is compressed")
    return True


def _other_classes(path: Path) -> list[str]:
    """The classes that the file names besides those of tensors and plain values; nothing of them is imported."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # noqa: BLE001 - the file is damaged, which the caller reports
        return []
