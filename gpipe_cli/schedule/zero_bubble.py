"""Split backward (ZB-H1, arXiv 2401.10241): weight gradients fill the gaps of waiting for input gradients.

Only the input gradient is on the way back to the first partition, so it runs where `1f1b` runs the backward.
The weight gradients lag so far behind that every partition keeps `partitions` micro-batches alive, as many as
the first one does under `1f1b`: the later a partition, the more of them are left for the gaps at the end.
"""

from __future__ import annotations

from gpipe_cli.schedule.action import Kind, Order
from gpipe_cli.schedule.placement import require_one_each
from gpipe_cli.schedule.stagger import staggered

NAME = "zero_bubble"


def order(partitions: int, chunks: int, devices: int) -> Order:
    require_one_each(NAME, partitions, devices)
    return tuple(
        staggered(partition, chunks, _delays(partition, partitions)) for partition in range(partitions)
    )


def _delays(partition: int, partitions: int) -> dict[Kind, int]:
    return {Kind.FORWARD: 0, Kind.INPUT_GRAD: partitions - 1 - partition, Kind.WEIGHT_GRAD: partitions - 1}
