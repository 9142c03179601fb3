"""One forward, one backward: a backward runs as soon as it can, so that few activations are alive.

The bubble is that of `gpipe`; partition `p` keeps min(chunks, partitions - p) micro-batches alive, not all.
"""

from __future__ import annotations

from gpipe_cli.schedule.action import Kind, Order, ScheduleTraits, staggered


def order(partitions: int, chunks: int, devices: int) -> Order:
    # The first gradient comes from the last partition, that many partitions further on. With fewer forwards before it
    # a worker would sit idle until then; more would only keep more activations alive.
    return tuple(
        staggered(partition, chunks, {Kind.FORWARD: 0, Kind.BACKWARD: partitions - 1 - partition})
        for partition in range(partitions)
    )


TRAITS = ScheduleTraits(
    name="1f1b",
    torch_schedule="Schedule1F1B",
    ticks_per_micro_batch=2,
    live_micro_batches=lambda partition, partitions, chunks, devices: min(chunks, partitions - partition),
)
