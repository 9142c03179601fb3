"""Earlier measurements of a model, so that a run need not measure it again.

    profiles = ProfileCache(default_folder())
    layers = profiles.times(module, sample)
    profiles.origin                     # where they come from, in words

A measurement is reused if it has the same fingerprint, took as long or longer, and still holds: the cache runs a part
of the work again for a moment, since a machine that was busy then, or is busy now, gives other times.

One JSON file per fingerprint, replaced atomically. The files are data from outside: the store reports and ignores one
that is not exactly what it would have written. If it cannot write to its folder, it says so and the run continues.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from gpipe_cli import __version__
from gpipe_cli.accelerator.devices import device_name, is_accelerator
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.profiling.layer_times import MAX_RUNS, forward_times, layer_times
from gpipe_cli.profiling.phase_times import MeasuredPipeline, PhaseTimes
from gpipe_cli.profiling.records import FORWARD, LAYERS, MEASURED, LayerTimes, Sample, has_values
from gpipe_cli.profiling.timeline import IsLate, TimeIsUp, late_after, never_late
from gpipe_cli.safe_files import user_cache
from gpipe_cli.sequential import layer_names
from gpipe_cli.sequential.selection import stays_in_eval_mode

TOLERANCE = 0.15
FEW_RUNS = 5
"""With which layers are measured that are measured for their shares alone."""
RUNS = 3
"""At most; the best one counts, so that a burst of other work now does not cost a good measurement."""
SHARE = 0.5
"""The slowest layers that take this share of the time are checked. Among many equal layers a single one would be picked
because it was disturbed most."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_VERSIONED = ("torch.", "torchvision.", "gpipe_cli.")
"""Packages whose source changes only with their version."""
FORMAT = 3
"""Files of format 2 lack the load of the machine; files of any other format are ignored."""
MAX_BYTES = 2**24
"""Bytes; ten thousand layers take one megabyte."""

Key = Mapping[str, Any]
Numbers = list[list[float]]


def default_folder() -> Path:
    return user_cache("profiles")


@final
class ProfileCache:
    def __init__(
        self,
        folder: Path | None,
        *,
        reuse: bool = True,
        warn: Callable[[str], None] = lambda line: None,
        is_late: IsLate = never_late,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """folder: None stores nothing. reuse: False measures everything again, and stores it.

        is_late: from when on nothing more is measured.
        """
        self._store, self._reuse, self._is_late = MeasurementStore(folder, warn), reuse, is_late
        self._clock = clock
        self.origin = ""
        """Where the times returned last come from, in words."""
        self.oldest: str | None = None
        """When the oldest measurement reused until now was made."""
        self.outdated: list[str] = []
        """The stored measurements that no longer hold, in words."""

    def allow(self, seconds: float) -> None:
        """From now on, measuring may take so long altogether; the layer that runs then is finished. 0: no limit."""
        self._is_late = late_after(seconds, self._clock)

    def times(self, module: nn.Sequential, sample: Sample) -> list[LayerTimes]:
        """The times of each layer from a few runs now, or from as many or more before if they still hold."""
        stored = self.stored_times(module, sample, 0.0, FEW_RUNS)
        return self.measured_times(module, sample, 0.0, FEW_RUNS) if stored is None else stored

    def stored_times(
        self, module: nn.Sequential, sample: Sample, seconds: float, runs: int = MAX_RUNS
    ) -> list[LayerTimes] | None:
        """The times of an earlier measurement, at least as long as `measured_times` would take, if they still hold."""
        can_run = has_values(module)
        if can_run and not self._reuse:
            return None
        key = fingerprint(module, sample)
        found = (self._store.load(one, len(module), 2, seconds) for one in (key, key | {"repeats": runs}))
        stored = next(filter(None, found), None)
        if stored is None:
            return None
        layers = [LayerTimes(forward, backward) for forward, backward in stored.numbers]
        forward_ms = [layer.forward_ms for layer in layers]
        drift = recheck_layers(module, sample, forward_ms, self._is_late) if can_run else None
        return layers if self._still_holds(stored, drift) else None

    def measured_times(
        self, module: nn.Sequential, sample: Sample, seconds: float, runs: int = MAX_RUNS
    ) -> list[LayerTimes]:
        """Measure now, each layer `runs` times or until it is late, and store the result if no layer is missing.

        `seconds` is how long this was allowed to take.
        """
        if not has_values(module):
            raise ConfigError(
                "balance=time: nothing is run here, and no measurement of this model with these settings is stored; "
                "`gpipe balance --by time` makes one and prints the line to paste, balance=params needs none"
            )
        # The load from before, because measuring raises it.
        load, began = load_per_core(), self._clock()
        layers = layer_times(module, sample, runs=runs, is_late=self._is_late)
        took, is_late = self._clock() - began, self._is_late()
        self.origin = "; ".join([f"{_which(layers)} in {took:.1f} s", *self.outdated])
        # A measurement that ended early serves runs of the same length only, such as the one after its dry run.
        key = fingerprint(module, sample) | (
            {} if runs == MAX_RUNS or (is_late and seconds) else {"repeats": runs}
        )
        if all(layer.source == MEASURED for layer in layers) and (seconds or not is_late):
            self._store.save(key, seconds, load, [[layer.forward_ms, layer.backward_ms] for layer in layers])
        return layers

    def phases(self, pipeline: MeasuredPipeline, seconds: float) -> PhaseTimes:
        """The times of the phases, measured for so long."""
        if self._is_late():
            raise TimeIsUp
        key = fingerprint(pipeline.module, pipeline.sample) | {
            "balance": list(pipeline.balance),
            "devices": [str(device) for device in pipeline.devices],
            "chunks": pipeline.chunks,
            "cores": pipeline.cores,
            "phases": [field.name for field in fields(PhaseTimes)],
        }
        stored = self._store.load(key, 1, len(fields(PhaseTimes)), seconds) if self._reuse else None
        if stored is not None:
            phases = PhaseTimes(*stored.numbers[0])
            drift = recheck_phases(pipeline, phases.forward + phases.backward, self._is_late)
            if self._still_holds(stored, drift):
                differs = math.inf if drift is None else abs(drift.ratio - 1)
                return replace(phases, spread=max(phases.spread, differs))
        load = load_per_core()
        phases = pipeline.phase_times(seconds, is_late=self._is_late)
        if not self._is_late():
            self._store.save(key, seconds, load, [astuple(phases)])
        return phases

    def _still_holds(self, stored: Measurement, drift: Drift | None) -> bool:
        """Whether stored times may be used; without a drift there was nothing to run to check them, or no time."""
        if drift is not None and not drift.tolerable:
            self.outdated.append(f"cached times of {stored} no longer hold: {drift}")
            return False
        why = "there was no time" if self._is_late() else "nothing is run here"
        reason = f"reused unchecked, since {why}" if drift is None else f"confirmed: {drift}"
        self.origin = f"cached times of {stored} {reason}; balance.cache=false measures them again"
        self.oldest = min(stored.measured, self.oldest or stored.measured)
        return True


@final
@dataclass(frozen=True)
class Drift:
    """What was run again, and how long it took as a multiple of the stored time."""

    what: str
    ratio: float

    @property
    def tolerable(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.what} took {self.ratio:.2f} x the cached time"


def recheck_layers(
    module: nn.Sequential, sample: Sample, forward_ms: Sequence[float], is_late: IsLate = never_late
) -> Drift | None:
    """Compare the forward of the slowest layers with what it took before; None if the time does not suffice."""
    checked = _slowest(forward_ms, without_last=sample.loss is not None)
    runs = [run for run in forward_times(module, sample, RUNS, is_late) if len(run) == len(module)]
    if not runs:
        return None
    best = min(sum(run[index] for index in checked) for run in runs)
    names = layer_names(module)
    others = f" and {len(checked) - 1} more" if len(checked) > 1 else ""
    return Drift(
        f"layer '{names[checked[0]]}'{others}", _ratio(best, sum(forward_ms[index] for index in checked))
    )


def recheck_phases(
    pipeline: MeasuredPipeline, cached_ms: float, is_late: IsLate = never_late
) -> Drift | None:
    """Compare the forward and backward of a pipeline with what they took before, until they agree or `RUNS` times.

    None if the time does not suffice for one.
    """
    partitions = len(pipeline.balance)
    what = "the model in one piece" if partitions == 1 else f"a pipeline of {partitions} partitions"
    drifts: list[Drift] = []
    while len(drifts) < RUNS and not (drifts and drifts[-1].tolerable):
        try:
            now = pipeline.forward_and_backward(is_late)
        except TimeIsUp:
            break
        drifts.append(Drift(what, _ratio(now, cached_ms)))
    return min(drifts, key=lambda drift: abs(drift.ratio - 1), default=None)


def _which(layers: Sequence[LayerTimes]) -> str:
    """Which layers were measured, and which estimated."""
    estimated = [index for index, layer in enumerate(layers) if layer.source != MEASURED]
    if not estimated:
        return "layers measured"
    how = "taken as equal" if any(layer.source == LAYERS for layer in layers) else "estimated from FLOPs"
    forward = [index for index in estimated if layers[index].source == FORWARD]
    others = [index for index in estimated if layers[index].source != FORWARD]
    parts = [
        *([f"the backward of layers {_ranges(forward)}"] if forward else []),
        *([f"layers {_ranges(others)}"] if others else []),
    ]
    return f"the time did not suffice, so {' and '.join(parts)} {how}; the rest measured"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: 0-3, 7."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(
        str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)
    )


def load_per_core() -> float | None:
    """How many threads compete for each core of the machine, on average over the last minute."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None


def _slowest(forward_ms: Sequence[float], *, without_last: bool) -> list[int]:
    """Indices, slowest first. With a loss the last layer's time contains it, so it cannot be compared."""
    indices = range(len(forward_ms) - (without_last and len(forward_ms) > 1))
    enough = SHARE * sum(forward_ms[index] for index in indices)
    chosen: list[int] = []
    for index in sorted(indices, key=lambda index: -forward_ms[index]):
        chosen.append(index)
        if sum(forward_ms[layer] for layer in chosen) >= enough:
            break
    return chosen


def _ratio(now: float, before: float) -> float:
    return now / before if before else math.inf


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
    def __init__(self, folder: Path | None, warn: Callable[[str], None]) -> None:
        """folder: None stores nothing."""
        self._folder, self._warn = folder, warn

    def load(self, key: Key, rows: int, columns: int, seconds: float) -> Measurement | None:
        """Numbers with so many rows and columns, if they were measured for `seconds` or longer."""
        if self._folder is None:
            return None
        path = self._path(self._folder, key)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it is larger than {MAX_BYTES} bytes")
            document = json.loads(path.read_text(encoding="utf-8"))
            measurement = _checked(document, key, rows, columns)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._warn(f"{path} is not a measurement and is ignored: {error}")
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
            self._warn(f"cannot store the measurement for the next run: {error}")

    @staticmethod
    def _path(folder: Path, key: Key) -> Path:
        # Only the file's name depends on the digest: the file repeats the key, and loading compares it.
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        return folder / f"{digest}.json"


def _checked(document: Any, key: Key, rows: int, columns: int) -> Measurement:
    """Raise ValueError for anything that a store would not have written."""
    match document:
        case {"seconds": seconds, "measured": str(measured), "load": load, "numbers": list(numbers)} if (
            (document.get("format"), document.get("key")) == (FORMAT, key)
            and all(map(_is_time, (seconds, 0 if load is None else load)))
            and len(measured) <= 40
            and [len(row) if isinstance(row, list) else None for row in numbers] == [columns] * rows
            and all(_is_time(number) for row in numbers for number in row)
        ):
            return Measurement([list(map(float, row)) for row in numbers], measured, load)
    raise ValueError("it has another format, belongs to another model, or has something else than times")


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
