"""One forward, one backward: a backward runs as soon as it can, so that few activations are alive.

The bubble is that of `gpipe`; partition `p` keeps min(chunks, partitions - p) micro-batches alive, not all.
"""

from __future__ import annotations

from gpipe_cli.schedule.action import Kind, Order
from gpipe_cli.schedule.placement import require_one_each
from gpipe_cli.schedule.stagger import staggered

NAME = "1f1b"


def order(partitions: int, chunks: int, devices: int) -> Order:
    require_one_each(NAME, partitions, devices)
    return tuple(
        staggered(partition, chunks, _delays(partition, partitions)) for partition in range(partitions)
    )


def _delays(partition: int, partitions: int) -> dict[Kind, int]:
    # The first gradient comes from the last partition, that many partitions away.
    return {Kind.FORWARD: 0, Kind.BACKWARD: partitions - 1 - partition}
