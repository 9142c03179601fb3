"""The order of one worker that can hold one partition at a time: all micro-batches before it goes on to the next.

No schedule to choose, as it has no parallel work; it is what engine=offload goes by. Each partition is entered twice,
the last one once, and backward goes through the micro-batches in ascending order as everywhere.
"""

from __future__ import annotations

from gpipe_cli.schedule.action import Action, Kind, Order

NAME = "by_slice"
OF_AN_ENGINE = True


def order(partitions: int, chunks: int, devices: int = 1) -> Order:
    assert devices == 1, "slices are run by one worker"
    there = [Action(Kind.FORWARD, one, chunk) for one in range(partitions) for chunk in range(chunks)]
    back = [
        Action(Kind.BACKWARD, one, chunk) for one in reversed(range(partitions)) for chunk in range(chunks)
    ]
    return ((*there, *back),)
