from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_cli.plan.devices import (
    BANDWIDTH_REACHED,
    DEVICES,
    FLOPS_REACHED,
    KERNEL_MS,
    DeviceSpec,
    estimate_costs,
)
from gpipe_cli.profiling.facts import model_facts
from gpipe_cli.profiling.layers import Sample

WIDTH, ROWS = 64, 16


def _estimated(device: DeviceSpec, scale: float = 1.0) -> tuple[list[float], list[float]]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    sample = Sample(torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), functional.mse_loss)
    costs = estimate_costs(list(model), model_facts(model, sample), device, scale)
    return costs.without_recompute.forward, [costs.partition(0, 1).transfer, costs.partition(1, 2).transfer]


def test_a_layer_takes_its_arithmetic_where_that_is_slower() -> None:
    forward, _ = _estimated(DeviceSpec(flops=1e6, memory=1, bandwidth=1e30, link=1e30))
    assert forward[1] == pytest.approx(1000 * 2 * ROWS * WIDTH * WIDTH / (FLOPS_REACHED * 1e6) + KERNEL_MS)


def test_a_layer_takes_its_traffic_where_that_is_slower() -> None:
    forward, transfers = _estimated(DeviceSpec(flops=1e30, memory=1, bandwidth=1e6, link=1e6))
    activation, parameters = 4 * ROWS * WIDTH, 4 * (WIDTH * WIDTH + WIDTH)
    traffic = 2 * activation + parameters
    assert forward[1] == pytest.approx(1000 * traffic / (BANDWIDTH_REACHED * 1e6) + KERNEL_MS)
    assert transfers == pytest.approx([1000 * activation / 1e6] * 2)


def test_more_rows_take_longer_but_not_to_start() -> None:
    device = DeviceSpec(flops=1e6, memory=1, bandwidth=1e30, link=1e30)
    (once, _), (twice, _) = _estimated(device), _estimated(device, 2.0)
    assert twice[1] - KERNEL_MS == pytest.approx(2 * (once[1] - KERNEL_MS))


def test_frozen_layers_have_less_to_do_in_backward() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    sample = Sample(torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), functional.mse_loss)
    device = DeviceSpec(flops=1e6, memory=1, bandwidth=1e30, link=1e30)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    costs = estimate_costs(list(model), model_facts(model, sample), device)
    once = 1000 * 2 * ROWS * WIDTH * WIDTH / (FLOPS_REACHED * 1e6)
    # The first layer has no backward, the second no gradient of its input, the third none of its weights.
    parts = [costs.partition(index, index + 1, checkpoint_stop=1) for index in range(4)]
    assert [part.backward for part in parts] == pytest.approx([0, once, once, 2 * once], rel=1e-3)
    assert [part.recompute > 0 for part in parts] == [False, True, True, True]
    assert parts[1].input_grad == 0 and parts[1].weight_grad == parts[1].backward
    assert costs.split.input_grad > costs.split.weight_grad


def test_every_device_has_figures_of_the_right_size() -> None:
    for device in DEVICES.values():
        assert 1e12 < device.flops < 1e15 and 2**33 < device.memory < 2**40
        assert 1e11 < device.bandwidth < 1e13 and 1e9 < device.link < device.bandwidth
