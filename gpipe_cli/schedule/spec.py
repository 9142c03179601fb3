"""A pipeline without its costs: schedule, partitions, micro-batches and devices, all a prediction starts from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import final

from gpipe_cli.schedule import ScheduleModule, order, traits
from gpipe_cli.schedule.action import Checkpoint, Order, ScheduleTraits, checkpointed_counts
from gpipe_cli.schedule.simulate import (
    PartitionCost,
    PartitionPeaks,
    Simulation,
    partition_peaks,
    peaks_of_live,
    simulate,
)

MAX_LISTED_ACTIONS = 1_000_000
"""Actions. Listing so many takes a second and some hundred megabytes."""

# Consecutive specs of a search often differ only in what they recompute, and then have the same order.
_order = lru_cache(maxsize=2)(order)


@final
@dataclass(frozen=True)
class PipelineSpec:
    schedule: str | ScheduleModule
    partitions: int
    micro_batches: int
    checkpoint: Checkpoint = "never"
    devices: int | None = None
    """None: one for each partition."""
    cores: int | None = None
    """How many workers can run at once; None: all of them."""

    @cached_property
    def partitions_per_device(self) -> int:
        """How many partitions the device with the most of them has."""
        workers = self.traits.workers
        if workers is None:  # in turn
            return -(-self.partitions // (self.devices or self.partitions))
        return max(Counter(workers).values())

    @property
    def traits(self) -> ScheduleTraits:
        return traits(self.schedule)

    @cached_property
    def order(self) -> Order:
        return _order(self.schedule, self.partitions, self.micro_batches, self.devices or self.partitions)

    @cached_property
    def checkpointed_counts(self) -> tuple[int, ...]:
        """By partition, the first micro-batch that is not recomputed."""
        return checkpointed_counts(self.checkpoint, self.partitions, self.micro_batches)

    @cached_property
    def peaks(self) -> list[PartitionPeaks]:
        """What each partition keeps alive; by the schedule's formula, if it has one, for an order too long to list."""
        live = self.traits.live_micro_batches
        if live is None or 2 * self.partitions * self.micro_batches <= MAX_LISTED_ACTIONS:
            return partition_peaks(self.order, self.checkpointed_counts)
        devices = self.devices or self.partitions
        return [
            peaks_of_live(
                live(partition, self.partitions, self.micro_batches, devices), self.micro_batches, stop
            )
            for partition, stop in enumerate(self.checkpointed_counts)
        ]

    def simulate(self, costs: Sequence[PartitionCost]) -> Simulation:
        return simulate(self.order, costs, checkpointed_counts=self.checkpointed_counts, cores=self.cores)
