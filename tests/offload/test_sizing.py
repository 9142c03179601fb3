from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.sizing import DeviceDemand, layer_bytes, optimizer_bytes
from gpipe_cli.profiling.facts import model_facts
from gpipe_cli.profiling.layers import Sample


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))


def demand(buffers: int = 2, saved_micro_batches: int = 0) -> DeviceDemand:
    facts = model_facts(model(), Sample(torch.zeros(4, 64)), count_flops=False)
    adam = optimizer_bytes(model(), partial(torch.optim.AdamW, lr=0.1))
    return DeviceDemand(layer_bytes(model()), adam, facts, buffers, saved_micro_batches)


LAYER = 64 * 64 * 4


def test_a_slice_is_there_twice_with_its_state_and_once_with_its_gradients() -> None:
    saved = 4 * 64 * 4  # the input of each layer
    assert demand().of([4, 4]) == pytest.approx(4 * (2 * 3 + 1) * LAYER + 4 * saved, rel=0.02)
    assert demand(buffers=1).of([8]) == pytest.approx(8 * (3 + 1) * LAYER + 8 * saved, rel=0.02)
    assert demand(saved_micro_batches=2).of([4, 4]) - demand().of([4, 4]) == 2 * 8 * saved


def test_the_fewest_slices_that_fit_are_chosen() -> None:
    costs = [1.0] * 8
    assert demand().slices(costs, 10**9) == [8]
    limit = demand().of([2, 2, 2, 2])
    assert demand().slices(costs, limit) == [2, 2, 2, 2]
    assert demand().slices(costs, limit - 1) == [1] * 8  # no other number has smaller slices


def test_a_memory_too_small_for_a_layer_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"engine.memory=1KiB: is too little, [\d.]+KiB are needed"):
        demand().slices([1.0] * 8, 1024)


def test_a_parameter_of_two_layers_counts_once() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    assert layer_bytes(nn.Sequential(first, second)) == [64, 0]
