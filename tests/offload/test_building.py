from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_cli.models import resnet
from gpipe_cli.offload.building import store_on_tier
from gpipe_cli.offload.tiers import DiskTier
from gpipe_cli.torch_internals import deferred_values
from gpipe_cli.torch_internals.deferred_values import DeferredValues


def stack() -> nn.Sequential:
    """Initialized twice, the second time from the last layer to the first, with views, and with a buffer."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(150, 150) for _ in range(4)), nn.Embedding(300, 80, padding_idx=7))
    for layer in reversed(model[:4]):
        nn.init.trunc_normal_(layer.weight)
        with torch.no_grad():
            layer.weight[3].fill_(0.5)
            layer.weight.mul_(2)
    model.register_buffer("mask", torch.rand(200, 200))
    return model


@pytest.mark.parametrize("in_memory", [0, 2**18, 2**30])
def test_a_model_built_on_a_disk_has_the_numbers_of_a_plain_one(
    in_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_values, "MAX_BYTES_IN_MEMORY", in_memory)
    monkeypatch.setattr(deferred_values, "SMALL", 2**12)
    plain, values = stack(), DeferredValues()
    with values.recording():
        model = stack()
    built = store_on_tier(DiskTier(tmp_path), model, values)
    for (name, mine), (_, theirs) in zip(
        built.model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert mine.shape == theirs.shape and mine.untyped_storage().nbytes() == mine.element_size(), name
        assert torch.equal(built.value_of(mine.data), theirs), name
    assert torch.equal(built.model.mask, plain.mask)
    built.close()


def test_a_torchvision_model_can_be_built_on_disk_and_split(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, values = resnet.build(), DeferredValues()
    torch.manual_seed(0)
    with values.recording():
        model = resnet.build()
    built = store_on_tier(DiskTier(tmp_path), model, values)
    expected = dict(plain.named_parameters())
    for name, parameter in built.model.named_parameters():
        assert torch.equal(built.value_of(parameter.data), expected[name]), name
    built.close()
