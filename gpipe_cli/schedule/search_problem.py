"""What an order is searched for: costs, the worker of each partition, micro-batches and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from gpipe_cli.schedule.action import Action, Kind, Order
from gpipe_cli.schedule.simulate import PartitionCost, Simulation, simulate


@final
@dataclass(frozen=True)
class SearchProblem:
    """What an order is searched for."""

    costs: tuple[PartitionCost, ...]
    """One per partition; they may differ."""
    workers: tuple[int, ...]
    """The worker of each partition."""
    chunks: int
    memory: tuple[float, ...] = ()
    """The bytes of each worker for what its partitions save for backward; none: no limit."""
    checkpoint_stops: tuple[int, ...] = ()
    """As `simulate` takes them."""
    kept_share: float = 1.0
    """The share of a graph that is kept between input gradient and weight gradient. gpipe's engines keep all of it."""
    synchronized: bool = True
    """Whether all workers end a step together, as gpipe's do. If not, a worker begins its next step when its own part
    has ended, and the step takes as long as the longest part: the bubble of the Zero Bubble paper."""
    cores: int | None = None
    """How many workers can run at once; None: all of them."""

    @property
    def partitions(self) -> int:
        return len(self.costs)

    @property
    def shares_cores(self) -> bool:
        """Whether workers wait for a core."""
        return self.cores is not None and self.cores < self.devices

    @cached_property
    def devices(self) -> int:
        return max(self.workers) + 1

    @cached_property
    def own(self) -> list[list[int]]:
        """The partitions of each worker, ascending."""
        return [
            [partition for partition, owner in enumerate(self.workers) if owner == worker]
            for worker in range(self.devices)
        ]

    @cached_property
    def transfers(self) -> list[float]:
        """From each partition to the next one, and back; nothing within a worker."""
        pairs = zip(self.workers, self.workers[1:], strict=False)
        return [
            0.0 if here == there else cost.transfer
            for (here, there), cost in zip(pairs, self.costs, strict=False)
        ]

    @cached_property
    def stops(self) -> tuple[int, ...]:
        return self.checkpoint_stops or (0,) * self.partitions

    @cached_property
    def work(self) -> list[float]:
        """The time each worker is busy if every backward is split."""
        return [
            sum(
                self.chunks * (self.costs[partition].forward + sum(self.costs[partition].split))
                + self.stops[partition] * self.costs[partition].recompute
                for partition in own
            )
            for own in self.own
        ]

    def simulate(self, order: Order) -> Simulation:
        return simulate(order, self.costs, checkpoint_stops=self.stops, cores=self.cores)

    def step_of(self, order: Order) -> float:
        simulation = self.simulate(order)
        return simulation.step if self.synchronized else simulation.longest_part

    def busiest(self, order: Order) -> float:
        """How long the worker with the most to do is busy."""
        busy = [0.0] * self.devices
        for span in self.simulate(order).spans:
            busy[span.worker] += span.end - span.begin
        return max(busy)

    def peaks(self, order: Order) -> list[float]:
        """The most bytes that each worker keeps for backward at once."""
        return [_peak(actions, self.costs, self.stops, self.kept_share) for actions in order]

    def fits(self, order: Order) -> bool:
        """Whether what the workers keep for backward fits their memory at every moment of the order."""
        return not self.memory or all(
            peak <= limit * (1 + 1e-9) for peak, limit in zip(self.peaks(order), self.memory, strict=True)
        )


def _peak(
    actions: Iterable[Action], costs: Sequence[PartitionCost], stops: Sequence[int], kept_share: float
) -> float:
    """The most that a worker keeps at once, over all its partitions."""
    kept = peak = 0.0
    for action in actions:
        cost, kind = costs[action.partition], action.kind
        is_checkpointed = action.micro_batch < stops[action.partition]
        if kind is Kind.FORWARD:
            kept += cost.input_bytes if is_checkpointed else cost.saved_bytes
        elif kind is not Kind.WEIGHT_GRAD and is_checkpointed:
            kept += cost.saved_bytes
        peak = max(peak, kept)
        if kind is Kind.INPUT_GRAD:
            kept -= cost.saved_bytes * (1 - kept_share)
        elif kind is not Kind.FORWARD:
            share = kept_share if kind is Kind.WEIGHT_GRAD else 1.0
            kept -= cost.saved_bytes * share + (cost.input_bytes if is_checkpointed else 0)
    return peak
