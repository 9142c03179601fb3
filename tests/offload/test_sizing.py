from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.sizing import DeviceDemand, device_demand, layer_bytes
from gpipe_cli.profiling.model_stats import model_stats
from gpipe_cli.profiling.records import Sample

CPU = torch.device("cpu")
ADAMW = partial(torch.optim.AdamW, lr=0.1)


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))


def demand(optimizer: Any = ADAMW, recomputed: int = 2, **changes: Any) -> DeviceDemand:
    facts = model_stats(model(), Sample(torch.zeros(4, 64)), count_flops=False)
    settings = {"buffers": 2, "stores_gradients": False, "micro_batches": 2, "batch_bytes": 0, **changes}
    return device_demand(model(), optimizer, CPU, facts, recomputed=recomputed, **settings)


LAYER = 64 * 64 * 4
ROW = 4 * 64 * 4
"""The input of a layer, and its output: what it saves for one micro-batch."""


def test_a_slice_is_there_twice_with_its_state_and_once_with_its_gradients_and_its_update() -> None:
    # Two micro-batches, two inputs on their way to the tier and one back.
    boundary = 5 * ROW
    # On a CPU AdamW creates two states and computes in two temporaries.
    assert demand().of([4, 4]) == pytest.approx(4 * (2 * 3 + 1 + 4) * LAYER + boundary, rel=0.02)
    assert demand(buffers=1).of([8]) == pytest.approx(8 * (3 + 1 + 4) * LAYER, rel=0.02)
    assert demand(recomputed=0).of([4, 4]) - demand().of([4, 4]) == 2 * 8 * ROW
    assert demand(batch_bytes=99).of([4, 4]) - demand().of([4, 4]) == 99


def test_gradients_that_wait_for_clipping_are_stored_with_their_slice() -> None:
    assert demand(stores_gradients=True).of([4, 4]) - demand().of([4, 4]) == 2 * 4 * LAYER


def test_where_an_update_needs_nothing_the_activations_of_the_largest_slice_count() -> None:
    sgd = demand(partial(torch.optim.SGD, lr=0.1))
    # Autograd computes a second gradient of a layer before it adds it to the first.
    working = 4 * ROW + ROW + 2 * ROW + LAYER
    assert sgd.of([4, 4]) == 4 * (2 + 1) * LAYER + working + 5 * ROW + 8 * 512


def test_parameters_of_several_layers_and_buffers_stay_on_the_device() -> None:
    tied = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.Linear(64, 64, bias=False))
    tied[2].weight = tied[0].weight
    facts = model_stats(tied, Sample(torch.zeros(4, 64)), count_flops=False)
    whole = device_demand(
        tied,
        partial(torch.optim.SGD, lr=0.1),
        CPU,
        facts,
        buffers=2,
        stores_gradients=False,
        micro_batches=1,
        recomputed=1,
        batch_bytes=0,
    )
    assert whole.resident == LAYER * (1 + 3) + 64 * 4 * 2 + 8 + 3 * 512
    assert [layer.weights for layer in whole.layers] == [0, 2 * 64 * 4, 0]


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
