"""V-Half and V-Min: legal for any size, with the memory and the bubbles that their paper gives."""

from __future__ import annotations

import pytest

from benchmarks.zero_bubble import v_problem, v_published
from gpipe_cli.plan.order_candidates import v_orders, v_shaped
from gpipe_cli.schedule.order_check import check_order
from gpipe_cli.schedule.simulate import PartitionCost

EQUAL_TIMES = PartitionCost(1, 2, input_grad=1, weight_grad=1)


@pytest.mark.parametrize("devices", range(2, 13))
def test_every_order_is_legal_and_goes_there_and_back(devices: int) -> None:
    for chunks in (1, 2, devices, 2 * devices + 1):
        for _, order in v_orders(chunks, devices):
            check_order(order, 2 * devices, chunks)
            placed = {action.partition: worker for worker, own in enumerate(order) for action in own}
            assert tuple(placed[partition] for partition in range(2 * devices)) == v_shaped(devices)


@pytest.mark.parametrize("devices", [4, 8, 16])
@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_for_equal_times_memory_and_bubble_are_at_most_the_published_ones(name: str, devices: int) -> None:
    chunks = 3 * devices
    kept, bubble = v_published(devices, chunks)[name]
    problem = v_problem([EQUAL_TIMES] * (2 * devices), devices, chunks, kept)
    fitting = [made for its, made in v_orders(chunks, devices) if its == name and problem.fits(made)]
    bubbles = [1 - problem.busiest(made) / problem.step_of(made) for made in fitting]
    assert min(bubbles) <= bubble


def test_the_first_device_of_v_min_for_two_devices_and_two_micro_batches_runs_this() -> None:
    _, order = next((name, made) for name, made in v_orders(2, 2) if name == "v_min")
    assert " ".join(map(str, order[0])) == "F0.0 F3.0 I3.0 W3.0 F0.1 I0.0 W0.0 F3.1 I3.1 W3.1 I0.1 W0.1"
