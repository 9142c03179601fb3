"""How long work takes on a device: the host's clock around repeats that end with a synchronization."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from gpipe_cli.accelerator.streams import synchronize

REPEATS = 5


def median_seconds(
    work: Callable[[], object], devices: Sequence[torch.device], *, repeats: int = REPEATS, calls: int = 1
) -> float:
    """Of one call of `work`, after one that does not count.

    calls: how many are queued between two synchronizations, for work that is shorter than one.
    """
    work()
    synchronize(devices)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(devices)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)
