"""What every schedule promises, for 1 to 8 partitions and 1 to 16 chunks."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from gpipe_cli.schedule import Order, names, order
from gpipe_cli.schedule.order_check import check_order
from gpipe_cli.schedule.simulate import PartitionCost, partition_peaks, simulate

PARTITIONS = range(1, 9)
CHUNKS = range(1, 17)
SIZES = list(itertools.product(PARTITIONS, CHUNKS))
ONE_EACH = ("gpipe", "1f1b", "zero_bubble")


def bubble(made: Order, backward: float = 2) -> float:
    partitions = len({action.partition for actions in made for action in actions})
    return simulate(made, [PartitionCost(1, backward)] * partitions).bubble


def written(orders: Order) -> list[str]:
    return [" ".join(map(str, actions)) for actions in orders]


@pytest.mark.parametrize("name", ONE_EACH)
def test_every_order_with_one_partition_per_device_is_legal(name: str) -> None:
    for partitions, chunks in SIZES:
        check_order(order(name, partitions, chunks, partitions), partitions, chunks)


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_every_interleaved_order_is_legal_whether_devices_divide_partitions_or_not(partitions: int) -> None:
    for devices, chunks in itertools.product(range(1, partitions + 1), CHUNKS):
        made = order("interleaved", partitions, chunks, devices)
        assert len(made) == devices
        assert all(
            action.partition % devices == worker for worker, actions in enumerate(made) for action in actions
        )
        check_order(made, partitions, chunks)


def test_the_orders_of_two_partitions_and_three_chunks_are_these() -> None:
    assert written(order("gpipe", 2, 3, 2)) == [
        "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2",
        "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2",
    ]
    assert written(order("1f1b", 2, 3, 2)) == [
        "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2",
    ]
    assert written(order("zero_bubble", 2, 3, 2)) == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ]
    assert written(order("interleaved", 4, 2, 2)) == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]


def test_interleaved_on_as_many_devices_as_partitions_is_1f1b() -> None:
    for partitions, chunks in SIZES:
        assert order("interleaved", partitions, chunks, partitions) == order(
            "1f1b", partitions, chunks, partitions
        )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b_is_the_closed_form_whatever_a_backward_costs(name: str) -> None:
    for (partitions, chunks), backward in itertools.product(SIZES, (1, 2, 3)):
        made = order(name, partitions, chunks, partitions)
        expected = (partitions - 1) / (chunks + partitions - 1)
        assert bubble(made, backward) == pytest.approx(expected)


def test_interleaving_divides_the_bubble_by_the_partitions_per_device() -> None:
    for devices, turns, groups in itertools.product((2, 3, 4), (1, 2), (1, 2, 4)):
        chunks = devices * groups
        made = order("interleaved", devices * turns, chunks, devices)
        assert bubble(made) == pytest.approx((devices - 1) / (chunks * turns + devices - 1))


def test_zero_bubble_waits_a_third_as_long_as_1f1b() -> None:
    """With F = I = W = 1 a worker of ZB-H1 waits (partitions - 1) (F + I - W), of 1f1b three times that."""
    for partitions, chunks in SIZES:
        if chunks >= partitions:
            idle = partitions - 1
            made = order("zero_bubble", partitions, chunks, partitions)
            assert bubble(made) == pytest.approx(idle / (3 * chunks + idle))


def test_gpipe_keeps_all_micro_batches_1f1b_those_that_follow_and_zero_bubble_as_many_everywhere() -> None:
    for partitions, chunks in SIZES:
        most = min(chunks, partitions)
        expected = {
            "gpipe": [chunks] * partitions,
            "1f1b": [min(chunks, partitions - index) for index in range(partitions)],
            "zero_bubble": [most] * partitions,
        }
        for name, kept in expected.items():
            peaks = partition_peaks(order(name, partitions, chunks, partitions))
            assert [each.bytes(graph=1, input=0) for each in peaks] == kept


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        *((name, (4, 8, 2), f"'{name}' .* got 4 for 2 devices; 'interleaved'") for name in ONE_EACH),
        *((name, (2, 8, 3), f"'{name}' .* got 2 for 3 devices$") for name in names()),
        ("f1b1", (2, 2, 2), "unknown schedule 'f1b1'; choose one of 1f1b, gpipe, interleaved, zero_bubble"),
        ("gpipe", (0, 1, 1), "at least one of partitions, got 0"),
        ("gpipe", (1, 0, 1), "at least one of chunks, got 0"),
        ("gpipe", (1, 1, 0), "at least one of devices, got 0"),
    ],
)
def test_sizes_that_a_schedule_cannot_have_are_refused_with_their_numbers(
    name: str, sizes: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        order(name, *sizes)


def test_schedules_do_without_torch() -> None:
    program = (
        "import sys, gpipe_cli.schedule as s; s.order('1f1b', 2, 2, 2); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
