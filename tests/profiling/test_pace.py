from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.pace import measure_phases

CPU = torch.device("cpu")


@pytest.mark.parametrize("partitions", [1, 2])
def test_every_phase_of_a_pipeline_is_measured_and_the_model_left_as_it_was(partitions: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    sample = Sample(torch.randn(4, 8), torch.randn(4, 4), functional.mse_loss)
    torch.set_rng_state(generator)

    found = measure_phases(model, sample, [4 // partitions] * partitions, [CPU] * partitions, chunks=4)

    assert min(found.forward, found.backward, found.checkpointed_forward, found.recompute) > 0
    assert found.input_grad + found.weight_grad > 0
    assert not model.training and all(one.grad is None for one in model.parameters())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
