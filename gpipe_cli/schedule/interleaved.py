"""1f1b with several partitions per device, dealt round robin (arXiv 2104.04473): less bubble, more traffic.

A device takes its partitions in turn, `devices` micro-batches at a time: so many keep every device busy until the first
one returns for the next partition. Each action has a tick on a clock, and a worker runs its actions in the order of
their ticks. Whatever an action waits for has an earlier tick, so workers never wait in a circle: neither chunks nor
partitions need be a multiple of devices. The order is that of Megatron-LM and of torch's ScheduleInterleaved1F1B.
"""

from __future__ import annotations

from bisect import bisect_left

from gpipe_cli.schedule.action import Action, Kind, Order, ScheduleTraits, partitions_of


def order(partitions: int, chunks: int, devices: int) -> Order:
    def actions(worker: int) -> list[Action]:
        return [
            Action(kind, partition, micro_batch)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for partition in partitions_of(worker, partitions, devices)
            for micro_batch in range(chunks)
        ]

    return tuple(
        tuple(sorted(actions(worker), key=lambda action: _tick(action, partitions, devices)))
        for worker in range(devices)
    )


def _tick(action: Action, partitions: int, devices: int) -> int:
    """Two ticks per slot, one for a forward and one for a backward.

    A slot belongs to one micro-batch on one of a device's partitions. The last partition turns round: its first
    backward is one tick after its first forward.
    """
    turn, worker = divmod(action.partition, devices)
    last_turn, last_worker = divmod(partitions - 1, devices)
    group, position = divmod(action.micro_batch, devices)
    # The next device has a whole slot of slack: with one tick, each transfer would delay it, in every round. The slack
    # costs a longer warm-up, and so more live micro-batches. With one partition per device this is 1f1b, without it.
    hop = 2 if last_turn else 1

    def slot(turn: int) -> int:
        return (group * (last_turn + 1) + turn) * devices + position

    if action.kind is Kind.FORWARD:
        return 2 * slot(turn) + hop * worker
    turning_point = 2 * last_turn * devices + hop * last_worker
    return turning_point + 1 + 2 * slot(last_turn - turn) + hop * (last_worker - worker)


def _live_micro_batches(partition: int, partitions: int, chunks: int, devices: int) -> int:
    """The most forwards of a partition that have an earlier tick than the backward of an earlier micro-batch."""

    def forwards_before(backward: int) -> int:
        return bisect_left(
            range(chunks),
            _tick(Action(Kind.BACKWARD, partition, backward), partitions, devices),
            key=lambda number: _tick(Action(Kind.FORWARD, partition, number), partitions, devices),
        )

    # The clock repeats with every round of one micro-batch per device. Within a round forwards and backwards advance
    # at the same pace, so the maximum is at the ends of a round.
    ends_of_rounds = {0, 1, devices - 1, devices, 2 * devices - 1, 2 * devices}
    return max(forwards_before(number) - number for number in ends_of_rounds if number < chunks)


TRAITS = ScheduleTraits(
    name="interleaved",
    several_per_device=True,
    torch_schedule="ScheduleInterleaved1F1B",
    ticks_per_micro_batch=2,
    live_micro_batches=_live_micro_batches,
)
