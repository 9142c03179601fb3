"""Split backward (ZB-H1, arXiv 2401.10241): weight gradients fill the gaps of waiting for input gradients.

Only the input gradient travels back to the first partition, so it runs where `1f1b` runs the backward. The weight
gradients lag so far behind that every partition keeps `partitions` micro-batches alive, as many as the first one does
under `1f1b`: the later a partition, the more weight gradients are left for the gaps at the end.
"""

from __future__ import annotations

from gpipe_cli.schedule.action import Kind, Order, ScheduleTraits, staggered


def order(partitions: int, chunks: int, devices: int) -> Order:
    last = partitions - 1
    return tuple(
        staggered(
            partition, chunks, {Kind.FORWARD: 0, Kind.INPUT_GRAD: last - partition, Kind.WEIGHT_GRAD: last}
        )
        for partition in range(partitions)
    )


TRAITS = ScheduleTraits(
    name="zero_bubble", splits_backward=True, torch_schedule="ScheduleInterleavedZeroBubble"
)
