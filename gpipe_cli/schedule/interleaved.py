"""1f1b with several partitions per device, dealt round robin (arXiv 2104.04473): less bubble, more traffic.

A device takes its partitions in turn, `devices` micro-batches at a time: so many keep every device busy until
the first comes back for the next partition. Each action has a place on a clock, and a worker runs its actions
as the clock tells. What an action waits for always stands earlier on the clock, so workers never wait in a
circle, whatever the numbers: neither chunks nor partitions need be a multiple of devices.
"""

from __future__ import annotations

from gpipe_cli.schedule.action import Action, Kind, Order
from gpipe_cli.schedule.placement import partitions_of

NAME = "interleaved"


def order(partitions: int, chunks: int, devices: int) -> Order:
    if partitions < devices:
        raise ValueError(
            f"schedule {NAME!r} needs a partition for each device, got {partitions} for {devices} devices"
        )
    return tuple(_worker(worker, partitions, chunks, devices) for worker in range(devices))


def _worker(worker: int, partitions: int, chunks: int, devices: int) -> tuple[Action, ...]:
    actions = (
        Action(kind, partition, micro_batch)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for partition in partitions_of(worker, partitions, devices)
        for micro_batch in range(chunks)
    )
    return tuple(sorted(actions, key=lambda action: clock(action, partitions, devices)))


def clock(action: Action, partitions: int, devices: int) -> int:
    """Two ticks per slot, one for a forward and one for a backward; the next device is one tick later.

    A slot belongs to one micro-batch on one of a device's partitions. The last partition turns round: its
    first backward stands one tick after its first forward.
    """
    turn, worker = divmod(action.partition, devices)
    last_turn, last_worker = divmod(partitions - 1, devices)
    turns = last_turn + 1
    if action.kind is Kind.FORWARD:
        return 2 * _slot(action.micro_batch, turn, turns, devices) + worker
    turning_point = 2 * last_turn * devices + last_worker
    way_back = 2 * _slot(action.micro_batch, last_turn - turn, turns, devices) + last_worker - worker
    return turning_point + 1 + way_back


def _slot(micro_batch: int, turn: int, turns: int, devices: int) -> int:
    group, place = divmod(micro_batch, devices)
    return (group * turns + turn) * devices + place
