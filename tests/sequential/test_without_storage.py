from __future__ import annotations

import torch
from torch import nn

from gpipe_cli.sequential.without_storage import without_storage


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


def test_what_has_no_storage_is_not_filled_and_what_has_is() -> None:
    with without_storage():
        large, small = torch.empty(1 << 17), torch.empty(8)
        for tensor in (large, small):
            assert nn.init.kaiming_normal_(tensor.view(2, -1)).shape == (2, tensor.numel() // 2)
            assert nn.init.trunc_normal_(tensor) is tensor and tensor.fill_(3.0) is tensor
    assert large.is_meta and torch.equal(small, torch.full((8,), 3.0))
