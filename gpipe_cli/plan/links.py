"""How long tensors take from one device of this machine to another, measured by copies of two sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from gpipe_cli.accelerator.streams import median_seconds

SMALL, LARGE = 2**12, 2**24
"""Bytes: the time of a small copy is latency, the rest of a large one's bandwidth."""


@final
@dataclass(frozen=True)
class Link:
    latency_ms: float
    bytes_per_second: float

    def ms(self, bytes: float) -> float:
        return self.latency_ms + 1000 * bytes / self.bytes_per_second


def measure_link(source: torch.device, destination: torch.device) -> Link:
    """Between a device and itself: a copy within its memory."""
    small, large = (_copy_seconds(size, source, destination) for size in (SMALL, LARGE))
    # The clock may be too coarse for the difference of two quick copies.
    return Link(1000 * small, (LARGE - SMALL) / max(large - small, 1e-9))


def _copy_seconds(bytes: int, source: torch.device, destination: torch.device) -> float:
    sent = torch.zeros(bytes, dtype=torch.uint8, device=source)
    received = torch.empty(bytes, dtype=torch.uint8, device=destination)
    return median_seconds(lambda: received.copy_(sent), (source, destination))
