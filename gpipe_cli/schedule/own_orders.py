"""Schedules whose order is data: `auto`, which is searched for, and `file`, which is read.

Their names are those of the options in conf/schedule. An order becomes a `FixedOrder` before anything runs it.
"""

from __future__ import annotations

from gpipe_cli.schedule import interleaved, one_f_one_b, traits
from gpipe_cli.schedule.action import Action, Kind, Order, partitions_of

AUTO, FILE = "auto", "file"
OWN_ORDERS = (AUTO, FILE)


def may_share_devices(schedule: str) -> bool:
    """Whether several partitions may be on one device."""
    return schedule in OWN_ORDERS or traits(schedule).several_per_device


def one_by_one(partitions: int, chunks: int, devices: int) -> Order:
    """Each micro-batch forward and backward before the next: no order keeps less."""
    return tuple(
        tuple(
            Action(kind, partition, micro_batch)
            for micro_batch in range(chunks)
            for kind, own in (
                (Kind.FORWARD, partitions_of(worker, partitions, devices)),
                (Kind.BACKWARD, reversed(partitions_of(worker, partitions, devices))),
            )
            for partition in own
        )
        for worker in range(devices)
    )


def similar_schedule(partitions: int, devices: int) -> str:
    """The schedule that an order is compared with, and that stands for it until there is one."""
    return one_f_one_b.TRAITS.name if partitions == devices else interleaved.TRAITS.name
