"""The course micro-batches take through a pipeline, without its costs: what a prediction of time or memory needs.

Knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from gpipe_cli.schedule import in_flight, order
from gpipe_cli.schedule.action import Order
from gpipe_cli.schedule.memory import Kept, kept_at_once
from gpipe_cli.schedule.simulate import PartitionCost, Simulation, simulate

LISTED = 1_000_000
"""Actions: a second, and some hundred megabytes."""


def checkpoint_stop(mode: str, micro_batches: int) -> int:
    """The first micro-batch that is not checkpointed; `except_last` means the last one that exists."""
    return {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[mode]


@final
@dataclass(frozen=True)
class Course:
    schedule: str
    partitions: int
    micro_batches: int
    checkpoint: str = "never"
    devices: int | None = None
    """None: one for each partition."""
    cores: int | None = None
    """How many workers can run at once; None: all of them."""

    @property
    def partitions_per_device(self) -> int:
        """At most."""
        return -(-self.partitions // (self.devices or self.partitions))

    @cached_property
    def order(self) -> Order:
        return order(self.schedule, self.partitions, self.micro_batches, self.devices or self.partitions)

    @property
    def checkpoint_stop(self) -> int:
        return checkpoint_stop(self.checkpoint, self.micro_batches)

    @cached_property
    def kept(self) -> list[Kept]:
        """What each partition keeps alive; an order too long to be listed is judged by its clock."""
        if 2 * self.partitions * self.micro_batches > LISTED and in_flight.knows(self.schedule):
            return in_flight.kept(
                self.schedule,
                self.partitions,
                self.micro_batches,
                self.devices or self.partitions,
                self.checkpoint_stop,
            )
        return kept_at_once(self.order, self.checkpoint_stop)

    def simulate(self, costs: Sequence[PartitionCost]) -> Simulation:
        return simulate(self.order, costs, checkpoint_stop=self.checkpoint_stop, cores=self.cores)
