"""Predicts when every action of an order begins and ends, from what the partitions cost.

Pure Python, no clock: a worker runs its actions in order, each as soon as what it needs has arrived and a core is
free. Knows nothing of where the costs come from.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from gpipe_cli.schedule.action import Action, Kind, Order


@final
@dataclass(frozen=True)
class PartitionCost:
    """Durations of one micro-batch on one partition, in any unit of time."""

    forward: float
    backward: float
    """The whole of it; a split backward is taken as two halves."""
    recompute: float = 0.0
    """Added before the backward of a micro-batch that was checkpointed."""
    transfer: float = 0.0
    """From this partition to the next, and of its gradient back."""

    @property
    def by_kind(self) -> dict[Kind, float]:
        half = self.backward / 2
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT_GRAD: half,
            Kind.WEIGHT_GRAD: half,
        }


class Span(NamedTuple):  # a tuple, because there may be millions of them
    action: Action
    worker: int
    begin: float
    end: float


@final
@dataclass(frozen=True)
class Simulation:
    spans: list[Span]
    workers: int

    @property
    def step(self) -> float:
        """From the first action's begin to the last one's end."""
        return max(span.end for span in self.spans)

    @property
    def bubble(self) -> float:
        """The share of all workers' time in which they do nothing."""
        busy = sum(span.end - span.begin for span in self.spans)
        return 1 - busy / (self.workers * self.step) if self.step else 0.0


def simulate(
    order: Order, costs: Sequence[PartitionCost], *, checkpoint_stop: int = 0, cores: int | None = None
) -> Simulation:
    """Run the order on paper. `cores` is how many workers can run at once; None: all of them.

    Micro-batches below `checkpoint_stop` recompute before their backward, which needs no gradient to begin:
    the recomputation may go on while the gradient is on its way.
    """
    return _Run(order, costs, checkpoint_stop, cores).finish()


@final
class _Way:
    """Over a border, in one direction: when each micro-batch arrives, and who waits for the next one."""

    __slots__ = ("arrivals", "waiting")

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.waiting: int | None = None


@final
class _Run:
    """One simulation. Micro-batches cross in ascending order, so how many have arrived says which."""

    def __init__(
        self, order: Order, costs: Sequence[PartitionCost], checkpoint_stop: int, cores: int | None
    ) -> None:
        self._order, self._costs, self._checkpoint_stop = order, costs, checkpoint_stop
        self._durations = [cost.by_kind for cost in costs]
        self._last = len(costs) - 1
        self._places = [0] * len(order)
        self._free = [0.0] * len(order)
        self._cores = [0.0] * (len(order) if cores is None else min(cores, len(order)))
        # When the outputs and the input gradients of each partition arrive where they are wanted.
        self._outputs = [_Way() for _ in costs]
        self._gradients = [_Way() for _ in costs]
        self._ready: list[tuple[float, int]] = []
        self._spans: list[Span] = []

    def finish(self) -> Simulation:
        for worker in range(len(self._order)):
            self._line_up(worker)
        while self._ready:
            self._run(*heapq.heappop(self._ready))
        if len(self._spans) < sum(map(len, self._order)):
            raise ValueError(
                "the order cannot be run: its workers wait for each other, or for what nobody does"
            )
        return Simulation(self._spans, len(self._order))

    def _line_up(self, worker: int) -> None:
        """Make a worker ready for its next action, or let it wait for what that needs."""
        place, actions = self._places[worker], self._order[worker]
        if place == len(actions):
            return
        action = actions[place]
        way = self._way(action)
        if way is None:  # its own forward a worker has done before, in its own order
            heapq.heappush(self._ready, (self._free[worker], worker))
        elif len(way.arrivals) > action.micro_batch:
            heapq.heappush(self._ready, (max(self._free[worker], way.arrivals[action.micro_batch]), worker))
        else:
            way.waiting = worker

    def _way(self, action: Action) -> _Way | None:
        """The way on which an action's input comes from another partition; None where it needs nothing."""
        partition, kind = action.partition, action.kind
        if kind is Kind.FORWARD:
            return self._outputs[partition - 1] if partition else None
        if kind is Kind.WEIGHT_GRAD or partition == self._last:
            return None
        return self._gradients[partition + 1]

    def _run(self, ready: float, worker: int) -> None:
        action = self._order[worker][self._places[worker]]
        kind, partition = action.kind, action.partition
        duration = self._durations[partition][kind]
        begin = max(ready, heapq.heappop(self._cores))
        if action.micro_batch < self._checkpoint_stop and kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            # It may begin when the worker is free, and be waiting for the gradient when it has ended.
            recompute = self._costs[partition].recompute
            begin = min(begin, max(self._free[worker], begin - recompute))
            duration += max(ready - begin, recompute)
        end = begin + duration
        heapq.heappush(self._cores, end)
        self._spans.append(Span(action, worker, begin, end))
        self._places[worker] += 1
        self._free[worker] = end
        if kind is Kind.FORWARD:
            self._deliver(self._outputs[partition], end + self._costs[partition].transfer)
        elif kind is not Kind.WEIGHT_GRAD:
            # A gradient goes back over the border it came by, which belongs to the partition before.
            self._deliver(self._gradients[partition], end + self._costs[max(0, partition - 1)].transfer)
        self._line_up(worker)

    def _deliver(self, way: _Way, time: float) -> None:
        way.arrivals.append(time)
        if way.waiting is not None:
            worker, way.waiting = way.waiting, None
            self._line_up(worker)
