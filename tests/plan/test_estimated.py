from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.device_table import DEVICES, DeviceSpec
from gpipe_cli.plan.estimated import DeviceRun, Efficiency, LayerUpdate, estimate_costs
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.orders import zero_bubble_v
from gpipe_cli.schedule.spec import PipelineSpec

WIDTH, ROWS = 64, 16
REACHED = Efficiency(start_ms=0.0)
"""So that the expected times are one product or quotient each."""
SLOW = DeviceSpec(flops=1e6, memory=1, bandwidth=1e30, link=1e30)
FAST = replace(SLOW, flops=1e30)
NARROW = DeviceSpec(flops=1e30, memory=1, bandwidth=1e6, link=1e6)
PRODUCT_MS = 1000 * 2 * ROWS * WIDTH * WIDTH / (REACHED.matrix * 1e6)
run_on = partial(DeviceRun, reached=REACHED)


def _facts(*layers: nn.Module) -> ModelStats:
    sample = Sample(torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), functional.mse_loss)
    return model_stats(nn.Sequential(*(layers or (nn.Linear(WIDTH, WIDTH), nn.ReLU()))), sample)


def _forward(costs: LayerCosts, layer: int = 0) -> float:
    return costs.partition(layer, layer + 1).forward


def test_a_layer_takes_its_arithmetic_its_traffic_or_its_launches_whichever_is_slowest() -> None:
    assert _forward(estimate_costs(_facts(), run_on(SLOW))) == pytest.approx(PRODUCT_MS)
    narrow = estimate_costs(_facts(), run_on(NARROW))
    activation, parameters = 4 * ROWS * WIDTH, 4 * (WIDTH * WIDTH + WIDTH)
    assert _forward(narrow) == pytest.approx(1000 * (2 * activation + parameters) / (REACHED.bandwidth * 1e6))
    transfer = REACHED.link_ms + 1000 * activation / (REACHED.link * 1e6)
    assert narrow.partition(0, 1).transfer == pytest.approx(transfer)
    block = _facts(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), nn.ReLU())
    assert _forward(estimate_costs(block, run_on(FAST))) == pytest.approx(3 * REACHED.launch_ms)
    # The host runs ahead while the device computes, so a slow kernel hides the launches of the others.
    assert _forward(estimate_costs(block, run_on(SLOW))) == pytest.approx(2 * PRODUCT_MS)
    # A kernel takes a moment on the device however little it does.
    start = run_on(FAST, reached=Efficiency(launch_ms=0.0, start_ms=0.5))
    assert _forward(estimate_costs(_facts(), start)) == pytest.approx(0.5)


def test_more_rows_take_longer_but_not_to_move_the_weights() -> None:
    once, twice = (estimate_costs(_facts(), run_on(SLOW), scale) for scale in (1.0, 2.0))
    assert _forward(twice) == pytest.approx(2 * _forward(once))
    once, twice = (estimate_costs(_facts(), run_on(NARROW), scale) for scale in (1.0, 2.0))
    more = 1000 * 2 * 4 * ROWS * WIDTH / (REACHED.bandwidth * 1e6)
    assert _forward(twice) - _forward(once) == pytest.approx(more)


def test_frozen_layers_have_less_to_do_in_backward() -> None:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    layers[0].requires_grad_(False)
    layers[2].requires_grad_(False)
    costs = estimate_costs(_facts(*layers), run_on(SLOW))
    # The first layer has no backward, the second no gradient of its input, the third none of its weights.
    parts = [costs.partition(index, index + 1, checkpoint_stop=1) for index in range(4)]
    once = PRODUCT_MS
    assert [part.backward for part in parts] == pytest.approx([0, once, once, 2 * once], rel=1e-3)
    assert [part.recompute > 0 for part in parts] == [False, True, True, True]
    assert parts[1].input_grad == 0 and parts[1].weight_grad == parts[1].backward


def test_half_precision_uses_tensor_cores_if_the_sizes_suit_them() -> None:
    device = replace(SLOW, flops=1e6, half=2e6, tensor=8e6)

    def forward(width: int, *, tensor_cores: bool = True) -> float:
        sample = Sample(torch.zeros(ROWS, width, dtype=torch.half))
        facts = model_stats(nn.Sequential(nn.Linear(width, width, bias=False).half()), sample)
        run = run_on(device, "fp16", tensor_cores)
        return _forward(estimate_costs(facts, run)) / (1000 * 2 * ROWS * width * width / REACHED.matrix)

    assert forward(64) == pytest.approx(1 / 8e6)
    assert forward(64, tensor_cores=False) == pytest.approx(1 / 2e6)
    assert forward(63) == pytest.approx(1 / 8e6 / REACHED.unaligned)
    assert forward(63, tensor_cores=False) == pytest.approx(1 / 2e6)


def test_tf32_makes_products_of_fp32_faster() -> None:
    run = run_on(replace(SLOW, tf32=8e6))
    fp32, tf32 = (estimate_costs(_facts(), replace(run, precision=each)) for each in ("fp32", "tf32"))
    assert _forward(fp32) == pytest.approx(8 * _forward(tf32))


def test_replicas_sum_gradients_around_a_ring_and_hide_it_behind_the_last_backward() -> None:
    update = [LayerUpdate(4000, 4000, 8000), LayerUpdate(0, 0, 0)]
    spec = PipelineSpec("1f1b", 2, 4)

    def after(run: DeviceRun) -> float:
        return estimate_costs(_facts(), run, 1.0, update).update_ms([1, 1], spec)

    optimizer = 1000 * (2 * 4000 + 4000 + 2 * 8000) / (REACHED.bandwidth * 1e6)
    assert after(run_on(NARROW)) == pytest.approx(optimizer)
    reduce = 1000 * 4000 * 2 * 3 / 4 / (REACHED.link * 1e6)
    four = run_on(NARROW, replicas=4)
    assert after(four) == pytest.approx(optimizer + reduce)
    network = replace(four, device=replace(NARROW, network=5e5), spans_machines=True)
    assert after(network) == pytest.approx(optimizer + 2 * reduce)
    backward = estimate_costs(_facts(), four).partition(0, 1).backward
    assert after(replace(four, overlaps=True)) == pytest.approx(optimizer + max(0.0, reduce - backward))


def test_partitions_that_share_a_parameter_sum_its_gradients() -> None:
    update = [LayerUpdate(4000, 4000, 8000)] * 2
    alone, shared = (estimate_costs(_facts(), run_on(NARROW), 1.0, update, bytes) for bytes in (0, 4000))
    for balance in ([2], [1, 1]):
        spec = PipelineSpec("1f1b", len(balance), 4)
        more = shared.update_ms(balance, spec) - alone.update_ms(balance, spec)
        expected = REACHED.link_ms + 1000 * 4000 / (REACHED.link * 1e6) if len(balance) > 1 else 0.0
        assert more == pytest.approx(expected)


def test_the_update_is_that_of_the_device_with_the_most_parameters_where_the_order_has_them() -> None:
    update = [LayerUpdate(4000, 4000, 8000), *[LayerUpdate(0, 0, 0)] * 2, LayerUpdate(4000, 4000, 8000)]
    costs = estimate_costs(_facts(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), run_on(NARROW), 1.0, update)
    in_turn = PipelineSpec("interleaved", 4, 2, devices=2)
    v_shaped = replace(in_turn, schedule=FixedOrder("v", zero_bubble_v(4, 2, 2)))
    one, both = (costs.update_ms([1, 1, 1, 1], spec) for spec in (in_turn, v_shaped))
    assert both == pytest.approx(2 * one)


def test_a_newer_device_is_faster_at_everything() -> None:
    facts = _facts(nn.Linear(WIDTH, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, WIDTH))
    older, newer = (estimate_costs(facts, run_on(DEVICES[name]), 4096.0) for name in ("a100", "b200"))
    for layer in range(4):
        old, new = older.partition(layer, layer + 1), newer.partition(layer, layer + 1)
        assert new.forward < old.forward and new.backward < old.backward
