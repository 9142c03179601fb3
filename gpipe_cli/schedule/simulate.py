"""Predicts when every action of an order begins and ends, and the bytes it keeps, from what its partitions cost.

Pure Python, no clock: a worker runs its actions in order, each as soon as what it needs has arrived and a core is
free; who was ready first gets the core. The order is one that `check` accepts. Knows nothing of where costs come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from itertools import chain
from typing import NamedTuple, TypeAlias, final

from gpipe_cli.schedule.action import Action, Kind, Order
from gpipe_cli.schedule.memory import partition_peaks


@final
@dataclass(frozen=True)
class PartitionCost:
    """What one micro-batch costs on one partition: durations in any unit of time, and bytes."""

    forward: float
    backward: float
    """The whole of it."""
    recompute: float = 0.0
    """Before the backward of a micro-batch that was checkpointed."""
    transfer: float = 0.0
    """From this partition to the next, and of its gradient back."""
    saved_bytes: int = 0
    """Kept for backward."""
    input_bytes: int = 0
    """Kept instead, where the rest is recomputed."""
    resident_bytes: int = 0
    """There all the time: parameters, gradients, the optimizer's state."""
    input_grad: float | None = None
    weight_grad: float | None = None
    """The parts of a split backward; None: a half each."""

    @property
    def split(self) -> tuple[float, float]:
        """The backward in two parts."""
        half = self.backward / 2
        return (
            half if self.input_grad is None else self.input_grad,
            half if self.weight_grad is None else self.weight_grad,
        )


class Span(NamedTuple):
    """A piece of work; `phase` is forward, recompute or backward, as a pipe's recorder calls them."""

    action: Action
    worker: int
    begin: float
    end: float
    phase: str


@final
@dataclass(frozen=True)
class Simulation:
    step: float
    """From the first action's begin to the last one's end."""
    bubble: float
    """The share of all workers' time in which they do nothing."""
    _order: Order
    _costs: Sequence[PartitionCost]
    _checkpoint_stops: Sequence[int]
    _begins: list[list[float]]

    @cached_property
    def spans(self) -> list[Span]:
        """Every piece of work, worker by worker."""
        roles_of = _roles(self._costs, self._checkpoint_stops)
        pieces = [[(role, one) for one in actions for role in roles_of(one)] for actions in self._order]
        return [
            Span(action, worker, begin, begin + role.duration, role.phase)
            for worker, begins in enumerate(self._begins)
            for (role, action), begin in zip(pieces[worker], begins, strict=True)
        ]

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most each partition keeps at once."""
        peaks = partition_peaks(self._order, self._checkpoint_stops)
        return tuple(
            cost.resident_bytes + peak.bytes(cost.saved_bytes, cost.input_bytes)
            for cost, peak in zip(self._costs, peaks, strict=True)
        )


def simulate(
    order: Order,
    costs: Sequence[PartitionCost],
    *,
    checkpoint_stops: Sequence[int] = (),
    cores: int | None = None,
) -> Simulation:
    """Run the order on paper. `cores` is how many workers can run at once; None: all of them.

    Micro-batches below their partition's stop recompute before their backward; no stops: none. That needs no
    gradient to begin, so it may go on while the gradient is on its way.
    """
    stops = checkpoint_stops or [0] * len(costs)
    roles_of = _roles(costs, stops)
    work = [list(chain.from_iterable(map(roles_of, actions))) for actions in order]
    begins = _run(work, min(cores or len(order), len(order)))
    if any(len(begun) < len(roles) for begun, roles in zip(begins, work, strict=True)):
        raise ValueError("the order cannot be run: its workers wait for each other, or for what nobody does")
    step = max(
        (begun[-1] + roles[-1].duration for begun, roles in zip(begins, work, strict=True) if roles),
        default=0.0,
    )
    busy = sum(role.duration for role in chain.from_iterable(work))
    bubble = 1 - busy / (len(order) * step) if step else 0.0
    return Simulation(step, bubble, order, costs, stops, begins)


@final
class _Way:
    """Over a border, in one direction. Micro-batches cross in ascending order, so counting tells which it is."""

    __slots__ = ("arrivals", "taken", "transfer", "waiting")

    def __init__(self, transfer: float) -> None:
        self.transfer = transfer
        self.arrivals: list[float] = []
        self.taken = 0
        self.waiting: tuple[int, float] | None = None
        """The worker that waits for the next one, and since when it has had nothing else to do."""


@final
@dataclass(slots=True)
class _Role:
    """What all micro-batches of one phase on one partition have in common."""

    phase: str
    duration: float
    needs: _Way | None = None
    """Where its input comes from another partition; what its own worker makes is there by that one's order."""
    gives: _Way | None = None


_RolesOf: TypeAlias = Callable[[Action], tuple[_Role, ...]]


def _roles(costs: Sequence[PartitionCost], stops: Sequence[int]) -> _RolesOf:
    """What an action consists of: a checkpointed backward has a recomputation before it."""
    outputs = [_Way(cost.transfer) for cost in costs]
    # A gradient goes back over the border its input came by, which belongs to the partition before.
    gradients = [_Way(costs[max(0, partition - 1)].transfer) for partition in range(len(costs))]
    inputs, output_gradients = [None, *outputs[:-1]], [*gradients[1:], None]
    table = [
        (
            (_Role("forward", cost.forward, inputs[partition], outputs[partition]),),
            (_Role("backward", cost.backward, output_gradients[partition], gradients[partition]),),
            (_Role("backward", cost.split[0], output_gradients[partition], gradients[partition]),),
            (_Role("backward", cost.split[1]),),
            (_Role("recompute", cost.recompute),),
        )
        for partition, cost in enumerate(costs)
    ]

    def roles_of(action: Action) -> tuple[_Role, ...]:
        forward, backward, input_grad, weight_grad, recompute = table[action.partition]
        kind = action.kind
        if kind is Kind.FORWARD:
            return forward
        if kind is Kind.WEIGHT_GRAD:
            return weight_grad
        gradient = backward if kind is Kind.BACKWARD else input_grad
        return recompute + gradient if action.micro_batch < stops[action.partition] else gradient

    return roles_of


def _run(work: Sequence[Sequence[_Role]], cores: int) -> list[list[float]]:
    """When each piece of work begins; an order that cannot be run to its end leaves some out."""
    begins: list[list[float]] = [[] for _ in work]
    free_cores = [0.0] * cores
    ready: list[tuple[float, int]] = []  # since when a worker can run its next piece

    def line_up(worker: int, free: float) -> None:
        """Make a worker ready for its next piece, or let it wait for what that needs."""
        roles, place = work[worker], len(begins[worker])
        if place == len(roles):
            return
        way = roles[place].needs
        if way is None:
            heappush(ready, (free, worker))
        elif way.taken < len(way.arrivals):
            arrival = way.arrivals[way.taken]
            way.taken += 1
            heappush(ready, (free if free > arrival else arrival, worker))
        else:
            way.waiting = worker, free

    for worker in range(len(work)):
        line_up(worker, 0.0)
    while ready:
        since, worker = heappop(ready)
        role = work[worker][len(begins[worker])]
        begin = since if since > free_cores[0] else free_cores[0]
        end = begin + role.duration
        heapreplace(free_cores, end)
        begins[worker].append(begin)
        way = role.gives
        if way is not None:
            way.arrivals.append(end + way.transfer)
            if way.waiting is not None:
                waiting, way.waiting = way.waiting, None
                line_up(*waiting)
        line_up(worker, end)
    return begins
