"""The course micro-batches take through a pipeline, without its costs: what a prediction of time or memory needs.

Knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import final

from gpipe_cli.schedule import in_flight, order
from gpipe_cli.schedule.action import Order
from gpipe_cli.schedule.checkpoint import Checkpoint, checkpoint_stops
from gpipe_cli.schedule.memory import Kept, kept_at_once
from gpipe_cli.schedule.simulate import PartitionCost, Simulation, simulate

LISTED = 1_000_000
"""Actions: a second, and some hundred megabytes."""

_order = lru_cache(maxsize=2)(order)
"""Courses that differ in nothing but what is recomputed have the same one."""


@final
@dataclass(frozen=True)
class Course:
    schedule: str
    partitions: int
    micro_batches: int
    checkpoint: Checkpoint = "never"
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
        return _order(self.schedule, self.partitions, self.micro_batches, self.devices or self.partitions)

    @cached_property
    def checkpoint_stops(self) -> tuple[int, ...]:
        """By partition, the first micro-batch that is not recomputed."""
        return checkpoint_stops(self.checkpoint, self.partitions, self.micro_batches)

    @cached_property
    def kept(self) -> list[Kept]:
        """What each partition keeps alive; an order too long to be listed is judged by its clock."""
        if 2 * self.partitions * self.micro_batches > LISTED and in_flight.knows(self.schedule):
            return in_flight.kept(
                self.schedule,
                self.partitions,
                self.micro_batches,
                self.devices or self.partitions,
                self.checkpoint_stops,
            )
        return kept_at_once(self.order, self.checkpoint_stops)

    def simulate(self, costs: Sequence[PartitionCost]) -> Simulation:
        return simulate(self.order, costs, checkpoint_stops=self.checkpoint_stops, cores=self.cores)
