from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli.run.sketch import sketched


def test_nothing_of_a_sketch_has_storage_and_ties_hold() -> None:
    def make() -> nn.Sequential:
        first, second = nn.Linear(400, 400), nn.Linear(400, 400)
        second.weight = first.weight
        return nn.Sequential(first, nn.BatchNorm1d(400), second)

    model = sketched(make)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model[0].weight is model[2].weight


def test_a_constructor_that_needs_values_gets_them_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> nn.Sequential:
        width = 1 + int(torch.ones(1 << 17).mean().item())
        return nn.Sequential(nn.Linear(width, 3))

    model = sketched(make)
    assert model[0].weight.shape == (3, 2) and model[0].weight.is_meta
    assert "built with storage, because its constructor needs values" in capsys.readouterr().err


def test_weights_of_a_file_are_not_loaded_but_cause_no_noise() -> None:
    state = nn.Linear(400, 400).state_dict()

    def make() -> nn.Sequential:
        layer = nn.Linear(400, 400)
        layer.load_state_dict(state)
        return nn.Sequential(layer)

    assert sketched(make)[0].weight.is_meta
