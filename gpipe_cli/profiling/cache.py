"""Earlier measurements of a model, so that a run need not measure it again.

    profiles = ProfileCache(default_folder())
    layers = profiles.times(module, sample, seconds=3.0)
    profiles.origin                     # where they come from, in words

A measurement is reused if it has the same fingerprint, took as long or longer, and still holds: the cache runs a part
of the work again for a moment, since a machine that was busy then, or is busy now, gives other times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from math import inf
from pathlib import Path
from typing import final

import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.layers import (
    MOST_REPEATS,
    IsLate,
    LayerTimes,
    Sample,
    forward_times,
    has_values,
    layer_times,
    never_late,
)
from gpipe_cli.profiling.measurement_store import Measurement, MeasurementStore, fingerprint
from gpipe_cli.profiling.phase_times import PhaseTimes, measure_forward_backward, measure_phase_times
from gpipe_cli.safe_files import user_cache
from gpipe_cli.sequential import layer_names

TOLERANCE = 0.15
RUNS = 3
"""At most; the best one counts, so that a burst of other work now does not cost a good measurement."""
SHARE = 0.5
"""The slowest layers that take this share of the time are checked. Among many equal layers a single one would be picked
because it was disturbed most."""


def default_folder() -> Path:
    return user_cache("profiles")


@final
class ProfileCache:
    def __init__(
        self,
        folder: Path | None,
        *,
        reuse: bool = True,
        say: Callable[[str], None] = lambda line: None,
        is_late: IsLate = never_late,
    ) -> None:
        """folder: None stores nothing. reuse: False measures everything again, and stores it.

        is_late: from when on measurements are as short as they can be, and are not stored.
        """
        self._store, self._reuse, self._is_late = MeasurementStore(folder, say), reuse, is_late
        self.origin = ""
        """Where the times returned last come from, in words."""
        self.oldest: str | None = None
        """When the oldest measurement reused until now was made."""
        self.outdated: list[str] = []
        """The stored measurements that no longer hold, in words."""

    def times(self, module: nn.Sequential, sample: Sample, seconds: float) -> list[LayerTimes]:
        """The times of each layer, measured for `seconds` now, or for as long or longer before if they still hold."""
        stored = self.stored_times(module, sample, seconds)
        return self.measured_times(module, sample, seconds) if stored is None else stored

    def stored_times(
        self, module: nn.Sequential, sample: Sample, seconds: float, repeats: int = MOST_REPEATS
    ) -> list[LayerTimes] | None:
        """The times of an earlier measurement, at least as long as `measured_times` would take, if they still hold."""
        runs = has_values(module)
        if runs and not self._reuse:
            return None
        key = fingerprint(module, sample)
        found = (self._store.load(one, len(module), 2, seconds) for one in (key, key | {"repeats": repeats}))
        stored = next(filter(None, found), None)
        if stored is None:
            return None
        layers = [LayerTimes(*row) for row in stored.numbers]
        drift = recheck_layers(module, sample, [layer.forward_ms for layer in layers]) if runs else None
        return layers if self._still_holds(stored, drift) else None

    def measured_times(
        self, module: nn.Sequential, sample: Sample, seconds: float, repeats: int = MOST_REPEATS
    ) -> list[LayerTimes]:
        """Measure now, for `seconds` or until each layer ran `repeats` times, and store the result."""
        if not has_values(module):
            raise ConfigError(
                "balance=time: nothing is run here, and no measurement of this model with these settings is stored; "
                "`gpipe balance --by time` makes one and prints the line to paste, balance=params needs none"
            )
        # The load from before, because measuring raises it.
        load, began = load_per_core(), time.perf_counter()
        layers = layer_times(module, sample, seconds=seconds, most_repeats=repeats, is_late=self._is_late)
        took = time.perf_counter() - began
        self.origin = "; ".join([f"layers measured in {took:.1f} s", *self.outdated])
        # A measurement that ended early serves runs of the same length only, such as the one after its dry run.
        ended_early = repeats < MOST_REPEATS and took < seconds
        key = fingerprint(module, sample) | ({"repeats": repeats} if ended_early else {})
        if not self._is_late():
            self._store.save(key, seconds, load, [astuple(layer) for layer in layers])
        return layers

    def phases(
        self,
        module: nn.Sequential,
        sample: Sample,
        balance: Sequence[int],
        devices: Sequence[torch.device],
        chunks: int,
        seconds: float,
        *,
        cores: int | None,
    ) -> PhaseTimes:
        """The phases of a pipeline: see `measure_phase_times`."""
        key = fingerprint(module, sample) | {
            "balance": list(balance),
            "devices": [str(device) for device in devices],
            "chunks": chunks,
            "cores": cores,
        }
        stored = self._store.load(key, 1, len(fields(PhaseTimes)), seconds) if self._reuse else None
        if stored is not None:
            phases = PhaseTimes(*stored.numbers[0])
            cached_ms = phases.forward + phases.backward
            drift = recheck_phases(module, sample, balance, devices, chunks, cached_ms, cores=cores)
            if self._still_holds(stored, drift):
                return phases
        load = load_per_core()
        phases = measure_phase_times(
            module, sample, balance, devices, chunks, seconds, cores=cores, is_late=self._is_late
        )
        if not self._is_late():
            self._store.save(key, seconds, load, [astuple(phases)])
        return phases

    def _still_holds(self, stored: Measurement, drift: Drift | None) -> bool:
        """Whether stored times may be used; without a drift nothing could be run to check them."""
        if drift is not None and not drift.tolerable:
            self.outdated.append(f"cached times of {stored} no longer hold: {drift}")
            return False
        reason = "reused unchecked, since nothing is run here" if drift is None else f"confirmed: {drift}"
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


def recheck_layers(module: nn.Sequential, sample: Sample, forward_ms: Sequence[float]) -> Drift:
    """Compare the forward of the slowest layers with what it took before."""
    checked = _slowest(forward_ms, without_last=sample.loss is not None)
    best = min(sum(run[index] for index in checked) for run in forward_times(module, sample, RUNS))
    names = layer_names(module)
    others = f" and {len(checked) - 1} more" if len(checked) > 1 else ""
    return Drift(
        f"layer '{names[checked[0]]}'{others}", _ratio(best, sum(forward_ms[index] for index in checked))
    )


def recheck_phases(
    module: nn.Sequential,
    sample: Sample,
    balance: Sequence[int],
    devices: Sequence[torch.device],
    chunks: int,
    cached_ms: float,
    *,
    cores: int | None,
) -> Drift:
    """Compare the forward and backward of a pipeline with what they took before, until they agree or `RUNS` times."""
    drifts: list[Drift] = []
    while len(drifts) < RUNS and not (drifts and drifts[-1].tolerable):
        now = sum(measure_forward_backward(module, sample, balance, devices, chunks, cores=cores))
        drifts.append(Drift(f"a pipeline of {len(balance)} partitions", _ratio(now, cached_ms)))
    return min(drifts, key=lambda drift: abs(drift.ratio - 1))


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
    return now / before if before else inf
