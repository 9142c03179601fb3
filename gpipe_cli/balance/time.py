"""Balance by time: every layer is measured on this machine, and the slowest partition is as quick as possible."""

from __future__ import annotations

from torch import nn

from gpipe_cli.balance.result import Balanced
from gpipe_cli.profiling.layers import Sample, profile_layers


def balance(module: nn.Sequential, sample: Sample, partitions: int, seconds: float = 3.0) -> Balanced:
    """`seconds` is how long to measure, five runs at least."""
    layers = profile_layers(module, sample, seconds=seconds)
    return Balanced.by([one.forward_ms + one.backward_ms for one in layers], partitions, "ms")
