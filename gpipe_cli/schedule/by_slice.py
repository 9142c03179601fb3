"""The order for a single worker that holds one partition at a time: all micro-batches, then the next partition.

engine=offload uses it; it has no parallel work, so users cannot choose it. The worker enters each partition twice, the
last one once, and runs backward in ascending micro-batch order as everywhere.
"""

from __future__ import annotations

from gpipe_cli.schedule.action import Action, Kind, Order, ScheduleTraits

TRAITS = ScheduleTraits(name="by_slice", several_per_device=True, engine_only=True)


def order(partitions: int, chunks: int, devices: int = 1) -> Order:
    if devices != 1:
        raise ValueError(f"schedule {TRAITS.name!r} runs on one device, got {devices}")
    forwards = [Action(Kind.FORWARD, slice, chunk) for slice in range(partitions) for chunk in range(chunks)]
    backwards = [
        Action(Kind.BACKWARD, slice, chunk)
        for slice in reversed(range(partitions))
        for chunk in range(chunks)
    ]
    return ((*forwards, *backwards),)
