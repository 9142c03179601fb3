"""Whether times that were measured before still hold: a part of the work is run again for a moment.

A machine that was busy then, or is busy now, gives other times. Decides what is run again and how much may differ;
knows nothing of files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import final

import torch
from torch import nn

from gpipe_cli.profiling.layers import Sample, forward_times
from gpipe_cli.profiling.pace import measure_plain_phases
from gpipe_cli.sequential import layer_names

__all__ = ["Drift", "load_per_core", "recheck_layers", "recheck_phases"]

TOLERANCE = 0.15
RUNS = 3
"""At most; the best one counts, so that a burst of other work now does not cost a good measurement."""
SHARE = 0.5
"""The costliest layers that take this share of the time are checked: of unequal layers one or two, while single ones
of many equal layers would be picked for having been disturbed most."""


@final
@dataclass(frozen=True)
class Drift:
    """What was run again, and how long it took as a multiple of the time measured before."""

    what: str
    ratio: float

    @property
    def tolerable(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.what} took {self.ratio:.2f} x the cached time"


def recheck_layers(module: nn.Sequential, sample: Sample, forward_ms: Sequence[float]) -> Drift:
    """Compare the forward of the costliest layers with what it took before."""
    checked = _costliest(forward_ms, without_last=sample.loss is not None)
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
        now = sum(measure_plain_phases(module, sample, balance, devices, chunks, cores=cores))
        drifts.append(Drift(f"a pipeline of {len(balance)} partitions", _ratio(now, cached_ms)))
    return min(drifts, key=lambda drift: abs(drift.ratio - 1))


def load_per_core() -> float | None:
    """How many threads want each core of the machine, on average over the last minute."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None


def _costliest(forward_ms: Sequence[float], *, without_last: bool) -> list[int]:
    """From the costliest on. With a loss the last layer's time contains it, and cannot be compared."""
    indices = range(len(forward_ms) - (without_last and len(forward_ms) > 1))
    enough = SHARE * sum(forward_ms[index] for index in indices)
    chosen: list[int] = []
    for index in sorted(indices, key=lambda index: -forward_ms[index]):
        chosen.append(index)
        if sum(forward_ms[one] for one in chosen) >= enough:
            break
    return chosen


def _ratio(now: float, before: float) -> float:
    return now / before if before else inf
