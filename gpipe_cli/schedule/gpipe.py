"""The schedule of the GPipe paper: all forwards, then all backwards.

Simple, and every activation of the mini-batch is alive in between. Unlike the paper's, the backward goes
through the micro-batches in ascending order, as in every schedule here: gradients add up in one order.
"""

from __future__ import annotations

from gpipe_cli.schedule.action import Kind, Order
from gpipe_cli.schedule.placement import require_one_each
from gpipe_cli.schedule.stagger import staggered

NAME = "gpipe"


def order(partitions: int, chunks: int, devices: int) -> Order:
    require_one_each(NAME, partitions, devices)
    delays = {Kind.FORWARD: 0, Kind.BACKWARD: chunks}
    return tuple(staggered(partition, chunks, delays) for partition in range(partitions))
