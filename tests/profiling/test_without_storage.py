from __future__ import annotations

import torch
from torch import nn

from gpipe_cli.profiling.without_storage import without_storage


def test_what_is_large_has_no_storage_and_what_is_small_has_values() -> None:
    with without_storage():
        layer = nn.Linear(10_000, 10_000)
        widths = torch.linspace(0, 1, 5).tolist()
        large = [torch.randn(1000, 1000), torch.full((1 << 17,), 2.0), torch.rand(1 << 17, device="cpu")]
        drawn = torch.randn(1 << 17, generator=torch.Generator())
    assert layer.weight.is_meta and not layer.bias.is_meta
    assert widths == [0, 0.25, 0.5, 0.75, 1]
    assert all(tensor.is_meta for tensor in (*large, drawn))
    assert not torch.zeros(1 << 17).is_meta
