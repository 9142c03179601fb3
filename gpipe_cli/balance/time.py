"""Balance by time: every layer is measured on this machine, and the slowest partition is as quick as possible."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_cli.balance.result import Balanced
from gpipe_cli.pipeline.microbatch import Value, tensors_of, value_like
from gpipe_cli.profiling.layers import Sample, profile_layers


def balance(module: nn.Sequential, sample: Sample, partitions: int, seconds: float = 3.0) -> Balanced:
    """`seconds` is how long to measure, five runs at least."""
    layers = profile_layers(module, sample, seconds=seconds)
    return Balanced.by([one.ms for one in layers], partitions, "ms")


def balance_by_time(
    module: nn.Sequential,
    sample: Value,
    partitions: int = 4,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Layers per partition for `GPipe`, from `timeout` seconds of measuring with `sample`, a micro-batch."""
    place = tensors_of(sample)[0].device if device is None else torch.device(device)
    moved = value_like(sample, tuple(tensor.to(place) for tensor in tensors_of(sample)))
    return balance(module, Sample(moved), partitions, seconds=timeout).layers
