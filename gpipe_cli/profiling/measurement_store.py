"""Measured numbers in files, so that a run need not measure them again, and the fingerprint they are stored under.

One JSON file per fingerprint, replaced atomically. The files are data from outside: the store reports and ignores one
that is not exactly what it would have written. If it cannot write to its folder, it says so and the run continues.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from gpipe_cli import __version__
from gpipe_cli.accelerator.devices import device_name, is_accelerator
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.sequential import layer_names
from gpipe_cli.sequential.selection import stays_in_eval_mode

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_VERSIONED = ("torch.", "torchvision.", "gpipe_cli.")
"""Packages whose source changes only with their version."""
FORMAT = 3
"""Files of format 2 lack the load of the machine; files of any other format are ignored."""
LARGEST = 2**24
"""Bytes; ten thousand layers take one megabyte."""

Key = Mapping[str, Any]
Numbers = list[list[float]]


class Measurement(NamedTuple):
    numbers: Numbers
    measured: str
    """Date and time."""
    load: float | None
    """Load of the machine per core when the measurement began; None if the system does not report it."""

    def __str__(self) -> str:
        return self.measured if self.load is None else f"{self.measured} (load {self.load:.1f} per core)"


@final
class MeasurementStore:
    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        """folder: None stores nothing."""
        self._folder, self._say = folder, say

    def load(self, key: Key, rows: int, columns: int, seconds: float) -> Measurement | None:
        """Numbers with so many rows and columns, if they were measured for `seconds` or longer."""
        if self._folder is None:
            return None
        path = self._path(self._folder, key)
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError(f"it is larger than {LARGEST} bytes")
            document = json.loads(path.read_text(encoding="utf-8"))
            measurement = _checked(document, key, rows, columns)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._say(f"{path} is not a measurement and is ignored: {error}")
            return None
        return measurement if document["seconds"] >= seconds else None

    def save(self, key: Key, seconds: float, load: float | None, numbers: Sequence[Sequence[float]]) -> None:
        if self._folder is None:
            return
        document = {
            "format": FORMAT,
            "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
            "seconds": seconds,
            "load": load,
            "key": key,
            "numbers": numbers,
        }
        path = self._path(self._folder, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another run may read or write the same file now: with a rename it sees the old or the new one, complete.
            with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
                json.dump(document, file)
            Path(file.name).replace(path)
        except OSError as error:
            self._say(f"cannot store the measurement for the next run: {error}")

    @staticmethod
    def _path(folder: Path, key: Key) -> Path:
        # Only the file's name depends on the digest: the file repeats the key, and loading compares it.
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        return folder / f"{digest}.json"


def _checked(document: Any, key: Key, rows: int, columns: int) -> Measurement:
    """Raise ValueError for anything that a store would not have written."""
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("key") != key:
        raise ValueError("it has another format or belongs to another model")
    seconds, measured, numbers = (document.get(name) for name in ("seconds", "measured", "numbers"))
    if not _is_time(seconds) or not isinstance(measured, str) or len(measured) > 40:
        raise ValueError("it does not say when and for how long it was measured")
    load = document.get("load")
    if load is not None and not _is_time(load):
        raise ValueError("it does not say how busy the machine was")
    if not isinstance(numbers, list) or len(numbers) != rows:
        raise ValueError(f"it does not have {rows} rows")
    for row in numbers:
        if not isinstance(row, list) or len(row) != columns or not all(map(_is_time, row)):
            raise ValueError(f"{str(row)[:40]} are not times")
    return Measurement([list(map(float, row)) for row in numbers], measured, load)


def _is_time(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )


def fingerprint(module: nn.Sequential, sample: Sample) -> dict[str, Any]:
    """Everything a measurement depends on. Values of parameters do not count: time does not depend on them."""
    device = tensors_of(sample.input)[0].device
    return {
        "gpipe": __version__,
        "torch": str(torch.__version__),
        "model": _model(module),
        "layers": len(module),
        "input": [_tensor(tensor) for tensor in tensors_of(sample.input)],
        "target": None if sample.target is None else _tensor(sample.target),
        "loss": None if sample.loss is None else _plain(repr(sample.loss)),
        "device": str(device),
        "processor": device_name(device)
        if is_accelerator(device)
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": str(torch.get_autocast_dtype(device.type))
        if torch.is_autocast_enabled(device.type)
        else None,
    }


def _model(module: nn.Sequential) -> str:
    """A digest: the whole description would be longer than the measurement."""
    layers = []
    for name, layer in zip(layer_names(module), module, strict=True):
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        # Layers made by tracing have code that their description leaves out.
        graphs = [_plain(str(graph)) for graph in getattr(layer, "_graphs", {}).values()]
        in_eval_mode = [path for path, part in layer.named_modules() if stays_in_eval_mode(part)]
        sizes = [[key, _tensor(tensor)] for key, tensor in tensors]
        layers.append([name, _plain(repr(layer)), graphs, sizes, in_eval_mode])
    classes = {type(submodule) for submodule in module.modules()}
    sources = sorted(source for kind in classes if (source := _source(kind)))
    return hashlib.sha256(json.dumps([layers, sources]).encode()).hexdigest()


def _tensor(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype), tensor.requires_grad]


def _source(kind: type) -> str:
    """The source of a user's class, which may change while its name stays."""
    if f"{kind.__module__}.".startswith(_VERSIONED):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # defined in an interactive shell, or in C
        return f"{kind.__module__}.{kind.__qualname__}"


def _plain(text: str) -> str:
    """Without addresses, which differ from run to run."""
    return _ADDRESS.sub("", text)
