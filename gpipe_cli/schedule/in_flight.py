"""How many micro-batches each partition keeps alive, for orders of so many actions that nobody lists them.

Under gpipe all of them; where actions stand on a clock, those whose forward stands before the backward of an earlier
one. A clock repeats itself with every round of one micro-batch per device, so a round is looked at and no more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gpipe_cli.schedule import gpipe as all_then_all
from gpipe_cli.schedule import interleaved, one_f_one_b
from gpipe_cli.schedule.action import Action, Kind
from gpipe_cli.schedule.memory import Alive, Kept


def knows(schedule: str) -> bool:
    return schedule in (all_then_all.NAME, one_f_one_b.NAME, interleaved.NAME)


def kept(
    schedule: str, partitions: int, micro_batches: int, devices: int, checkpoint_stops: Sequence[int]
) -> list[Kept]:
    """What `kept_at_once` says of the listed order; with `except_last` up to one graph more."""
    found = []
    for partition in range(partitions):
        if schedule == all_then_all.NAME:
            alive = micro_batches
        elif schedule == one_f_one_b.NAME:
            alive = min(micro_batches, partitions - partition)
        else:
            alive = _by_clock(partition, partitions, micro_batches, devices)
        found.append(Kept(_moments(alive, micro_batches, checkpoint_stops[partition])))
    return found


def _by_clock(partition: int, partitions: int, micro_batches: int, devices: int) -> int:
    def before(backward: int) -> int:
        moment = interleaved.clock(Action(Kind.BACKWARD, partition, backward), partitions, devices)
        return bisect_left(
            range(micro_batches),
            moment,
            key=lambda number: interleaved.clock(
                Action(Kind.FORWARD, partition, number), partitions, devices
            ),
        )

    # Within a round forwards and backwards go on at the same pace, so its ends and its wraps are the worst.
    places = {0, 1, devices - 1, devices, 2 * devices - 1, 2 * devices}
    return max(before(number) - number for number in places if number < micro_batches)


def _moments(alive: int, micro_batches: int, checkpoint_stop: int) -> tuple[Alive, ...]:
    if checkpoint_stop == 0:
        return (Alive(alive, 0),)
    recomputing = Alive(1, alive)
    if checkpoint_stop == micro_batches or alive == 1:
        return (recomputing,)
    # The last one keeps its graph from the beginning, while one before it is recomputed.
    return (Alive(2, alive - 1), recomputing) if alive < micro_batches else (Alive(2, alive - 1),)
