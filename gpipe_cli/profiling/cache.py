"""What was measured of a model before, so that a run need not measure it again.

    profiles = ProfileCache(default_folder())
    layers = profiles.times(module, sample, seconds=3.0)
    profiles.origin                     # where they come from, in words

Decides what may be reused: the same model, sample, device, threads and versions (`fingerprint`), measured for as
long or longer, if a quick check (`recheck`) finds that it takes as long now.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import final

import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.fingerprint import fingerprint
from gpipe_cli.profiling.layers import Sample, profile_layers
from gpipe_cli.profiling.pace import Phases, measure_phases
from gpipe_cli.profiling.recheck import Drift, load_per_core, recheck_layers, recheck_phases
from gpipe_cli.profiling.shelf import Found, Shelf

__all__ = ["LayerTimes", "ProfileCache", "default_folder"]


@final
@dataclass(frozen=True)
class LayerTimes:
    forward_ms: float
    backward_ms: float


def default_folder() -> Path:
    """In the user's own cache; the XDG specification says to ignore a relative path."""
    named = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (named if named.is_absolute() else Path.home() / ".cache") / "gpipe" / "profiles"


@final
class ProfileCache:
    def __init__(
        self, folder: Path | None, *, reuse: bool = True, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """Without a folder nothing is kept; without `reuse` everything is measured anew, and kept."""
        self._shelf, self._reuse = Shelf(folder, say), reuse
        self.origin = ""
        """Where the times that were asked for last come from."""
        self.oldest: str | None = None
        """When the oldest measurement was made that was reused, of those asked for so far."""
        self.outdated: list[str] = []
        """Those that were there, but did not hold any more, in words."""

    def times(self, module: nn.Sequential, sample: Sample, seconds: float) -> list[LayerTimes]:
        """Of each layer, measured for `seconds` now, or for as long or longer before if that still holds."""
        key = fingerprint(module, sample)
        has_storage = not any(parameter.is_meta for parameter in module.parameters())
        if self._reuse or not has_storage:
            known = self._shelf.find(key, len(module), 2, seconds)
            if known is not None:
                layers = [LayerTimes(*row) for row in known.numbers]
                forward = [layer.forward_ms for layer in layers]
                drift = recheck_layers(module, sample, forward) if has_storage else None
                if self._holds(known, drift):
                    return layers
        if not has_storage:
            raise ConfigError(
                "balance=time: nothing is run here, and no measurement of this model with these settings is kept; "
                "`gpipe balance --by time` makes one and prints the line to paste, balance=params needs none"
            )
        load, began = load_per_core(), time.perf_counter()
        layers = [
            LayerTimes(one.forward_ms, one.backward_ms)
            for one in profile_layers(module, sample, seconds=seconds)
        ]
        self.origin = "; ".join([f"layers measured in {time.perf_counter() - began:.1f} s", *self.outdated])
        self._shelf.keep(key, seconds, load, [astuple(one) for one in layers])
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
    ) -> Phases:
        """Of a pipeline: see `measure_phases`."""
        key = fingerprint(module, sample) | {
            "balance": list(balance),
            "devices": [str(one) for one in devices],
            "chunks": chunks,
            "cores": cores,
        }
        known = self._shelf.find(key, 1, len(fields(Phases)), seconds) if self._reuse else None
        if known is not None:
            phases = Phases(*known.numbers[0])
            cached_ms = phases.forward + phases.backward
            drift = recheck_phases(module, sample, balance, devices, chunks, cached_ms, cores=cores)
            if self._holds(known, drift):
                return phases
        load = load_per_core()
        phases = measure_phases(module, sample, balance, devices, chunks, seconds, cores=cores)
        self._shelf.keep(key, seconds, load, [astuple(phases)])
        return phases

    def _holds(self, known: Found, drift: Drift | None) -> bool:
        """Whether cached times may be used; without a drift nothing could be run to check them."""
        if drift is not None and not drift.tolerable:
            self.outdated.append(f"cached times of {known} do not hold any more: {drift}")
            return False
        verdict = "reused unchecked, since nothing is run here" if drift is None else f"confirmed: {drift}"
        self.origin = f"cached times of {known} {verdict}; balance.cache=false measures them anew"
        self.oldest = min(known.measured, self.oldest or known.measured)
        return True
