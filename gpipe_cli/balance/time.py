"""Balance by time: every layer is measured on this machine, and the slowest partition is as quick as possible."""

from __future__ import annotations

from torch import nn

from gpipe_cli.balance.result import Balanced
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.profiling.layers import profile_layers


def balance(module: nn.Sequential, sample: Value, partitions: int, seconds: float = 3.0) -> Balanced:
    """`sample` is one micro-batch; `seconds` is how long to measure, five runs at least."""
    layers = profile_layers(module, sample, seconds=seconds)
    return Balanced.by([one.forward_ms + one.backward_ms for one in layers], partitions, "ms")
