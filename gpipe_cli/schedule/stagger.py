"""What schedules with one partition per worker share: rounds, in which each kind lags by its own delay.

Knows nothing of what the delays mean; a schedule is the choice of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpipe_cli.schedule.action import Action, Kind


def staggered(partition: int, chunks: int, delays: Mapping[Kind, int]) -> tuple[Action, ...]:
    """In round `r`, each kind in the order given runs micro-batch `r - delay`, if there is one."""
    return tuple(
        Action(kind, partition, now - delay)
        for now in range(chunks + max(delays.values()))
        for kind, delay in delays.items()
        if 0 <= now - delay < chunks
    )
