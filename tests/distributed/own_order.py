"""An order of one's own for tests: two partitions per rank, there and back, some backwards whole and some split."""

from __future__ import annotations

from gpipe_cli.plan.order_candidates import with_joined_backwards
from gpipe_cli.schedule import ScheduleModule
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.orders import zero_bubble_v

THERE_AND_BACK = "there and back"
"""In place of the name of a schedule."""


def schedule_called(name: str, ranks: int, chunks: int) -> str | ScheduleModule:
    if name != THERE_AND_BACK:
        return name
    whole = [partition % (chunks + 1) for partition in range(2 * ranks)]
    return FixedOrder(name, with_joined_backwards(zero_bubble_v(2 * ranks, chunks, ranks), whole))
