"""What an order is searched for: costs, the worker of each partition, micro-batches and memory; a bound on its step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import floor
from typing import final

from gpipe_cli.schedule.action import Action, Kind, Order
from gpipe_cli.schedule.simulate import PartitionCost, Simulation, live_change, simulate


@final
@dataclass(frozen=True)
class OrderProblem:
    """What an order is searched for."""

    costs: tuple[PartitionCost, ...]
    """One per partition; they may differ."""
    workers: tuple[int, ...]
    """The worker of each partition."""
    chunks: int
    memory: tuple[float, ...] = ()
    """The bytes of each worker for what its partitions save for backward; none: no limit."""
    checkpointed_counts: tuple[int, ...] = ()
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
        return self.checkpointed_counts or (0,) * self.partitions

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
        return simulate(order, self.costs, checkpointed_counts=self.stops, cores=self.cores)

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
        """The most bytes that each worker keeps for backward at once, over all its partitions."""
        return [self._peak(actions) for actions in order]

    def _peak(self, actions: Iterable[Action]) -> float:
        kept = peak = 0.0
        for action in actions:
            is_checkpointed = action.micro_batch < self.stops[action.partition]
            running, ended = self.kept_changes[action.partition][action.kind, is_checkpointed]
            peak = max(peak, kept + running)
            kept += ended
        return peak

    @cached_property
    def kept_changes(self) -> list[dict[tuple[Kind, bool], tuple[float, float]]]:
        """The bytes that an action adds to what its worker keeps for backward, while it runs and once it has ended.

        One table for each partition, by the kind of action and by whether its micro-batch is checkpointed.
        """
        changes = {
            (kind, is_checkpointed): live_change(kind, is_checkpointed=is_checkpointed, kept=self.kept_share)
            for kind in Kind
            for is_checkpointed in (False, True)
        }
        return [
            {key: (running.bytes(cost), ended.bytes(cost)) for key, (running, ended) in changes.items()}
            for cost in self.costs
        ]

    def fits(self, order: Order) -> bool:
        """Whether what the workers keep for backward fits their memory at every moment of the order."""
        return not self.memory or all(
            peak <= limit * (1 + 1e-9) for peak, limit in zip(self.peaks(order), self.memory, strict=True)
        )


def step_bound(problem: OrderProblem) -> float:
    """No order that fits the memory takes less, whatever it does; in the unit of the costs."""
    heads, tails = _heads(problem), _tails(problem)
    all_work = sum(_least_work(problem, own) for own in problem.own)
    bounds = []
    if problem.synchronized:
        bounds.append(all_work / min(problem.cores or problem.devices, problem.devices))
    for worker, own in enumerate(problem.own):
        head, work = heads[own[0]], _least_work(problem, own)
        # Nothing runs before its first input arrives. Unsynchronized, that time belongs to the previous step.
        bounds.append(work + (head if problem.synchronized else 0.0))
        # After its forwards and input gradients, which need not wait for weight gradients, the last gradient still
        # passes all earlier partitions.
        critical = problem.chunks * sum(
            problem.costs[one].forward + _gradient(problem.costs[one]) for one in own
        )
        bounds.append(head + critical + tails[own[0]])
        if problem.memory:
            bounds += _memory_bounds(problem, worker, heads)
    return max(bounds)


def _gradient(cost: PartitionCost) -> float:
    """The least time from an output's gradient to that of the input: half a backward, or a whole one."""
    return min(cost.split[0], cost.backward)


def _least_kept(problem: OrderProblem, cost: PartitionCost) -> float:
    """How long the backward of a split micro-batch keeps it, as if all of it were kept."""
    return cost.split[0] + problem.kept_share * cost.split[1]


def _least_work(problem: OrderProblem, own: list[int]) -> float:
    """A backward in one piece may take less than its parts."""
    return sum(
        problem.chunks * (cost.forward + min(cost.backward, sum(cost.split)))
        + problem.stops[partition] * cost.recompute
        for partition in own
        for cost in (problem.costs[partition],)
    )


def _heads(problem: OrderProblem) -> list[float]:
    """When the first input can arrive at each partition."""
    steps = [
        cost.forward + transfer
        for cost, transfer in zip(problem.costs, [*problem.transfers, 0.0], strict=True)
    ]
    return [0.0, *accumulate(steps)][: problem.partitions]


def _tails(problem: OrderProblem) -> list[float]:
    """What follows the last input gradient of each partition: those of the earlier ones, and a weight gradient."""
    steps = [
        _gradient(cost) + transfer for cost, transfer in zip(problem.costs, problem.transfers, strict=False)
    ]
    first = problem.costs[0]
    weights = min(first.split[1], first.backward - _gradient(first))
    return [weights + passed for passed in [0.0, *accumulate(steps)][: problem.partitions]]


def _memory_bounds(problem: OrderProblem, worker: int, heads: list[float]) -> list[float]:
    own, limit = problem.own[worker], problem.memory[worker]
    if any(problem.stops[partition] for partition in own):
        return []  # what a micro-batch keeps changes when it is recomputed: left to the other bounds
    costs = problem.costs
    end = heads[-1] + costs[-1].forward
    back = [0.0] * problem.partitions
    for partition in reversed(range(problem.partitions - 1)):
        back[partition] = back[partition + 1] + _gradient(costs[partition + 1]) + problem.transfers[partition]
    # A micro-batch is kept from its forward until its input gradient, and partly until its weight gradient: the most
    # that fit at once, over the whole step.
    area = sum(
        problem.chunks
        * costs[one].saved_bytes
        * (end - heads[one] + back[one] + min(costs[one].backward, _least_kept(problem, costs[one])))
        for one in own
    )
    bounds = [area / limit]
    smallest = min(costs[one].saved_bytes for one in own)
    if problem.synchronized and smallest > 0:
        # Until its first gradient arrives, a worker can only run as many forwards as fit.
        longest = max(costs[one].forward for one in own)
        fitting = min(floor(limit / smallest), len(own) * problem.chunks)
        bounds.append(end + back[own[-1]] + _least_work(problem, own) - fitting * longest)
    return bounds
