"""The schedule of the GPipe paper: all forwards, then all backwards.

Simple, and every activation of the mini-batch is alive in between. Unlike the paper's, the backward runs the
micro-batches in ascending order, as every schedule here does, so that gradients are always summed in one order.
"""

from __future__ import annotations

from gpipe_cli.schedule.action import Kind, Order, ScheduleTraits, staggered


def order(partitions: int, chunks: int, devices: int) -> Order:
    delays = {Kind.FORWARD: 0, Kind.BACKWARD: chunks}
    return tuple(staggered(partition, chunks, delays) for partition in range(partitions))


TRAITS = ScheduleTraits(
    name="gpipe",
    torch_schedule="ScheduleGPipe",
    ticks_per_micro_batch=1,
    live_micro_batches=lambda partition, partitions, chunks, devices: chunks,
)
