"""Schedules whose order is data: `auto`, which is searched for, and `file`, which is read.

Their names are those of the options in conf/schedule. An order becomes a `FixedOrder` before anything runs it.
"""

from __future__ import annotations

from gpipe_cli.schedule import interleaved, one_f_one_b, traits

AUTO, FILE = "auto", "file"
OWN_ORDERS = (AUTO, FILE)


def may_share_devices(schedule: str) -> bool:
    """Whether several partitions may be on one device."""
    return schedule in OWN_ORDERS or traits(schedule).several_per_device


def similar_schedule(partitions: int, devices: int) -> str:
    """The schedule that an order is compared with, and that stands for it until there is one."""
    return one_f_one_b.TRAITS.name if partitions == devices else interleaved.TRAITS.name
