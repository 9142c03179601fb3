"""Predicts when every action of an order begins and ends, and what it keeps alive, from the costs of its partitions.

A worker runs its actions in order, each as soon as its inputs have arrived and a core is free; the worker that was
ready first gets the core. The order is one that `check` accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import heappop, heappush, heapreplace
from itertools import chain
from typing import NamedTuple, TypeAlias, final

from gpipe_cli.schedule.action import Action, Kind, Order


@final
@dataclass(frozen=True)
class PartitionCost:
    """What one micro-batch costs on one partition: durations in any unit of time, and bytes."""

    forward: float
    backward: float
    """The backward of input and weights together."""
    recompute: float = 0.0
    """The forward that runs again before the backward of a checkpointed micro-batch."""
    transfer: float = 0.0
    """The copy of the output to the next partition, and of its gradient in the other direction."""
    saved_bytes: int = 0
    """Saved for backward."""
    input_bytes: int = 0
    """Saved instead if the micro-batch is checkpointed."""
    resident_bytes: int = 0
    """Parameters, gradients and the optimizer's state."""
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


TRANSFERS = ("load", "drop")
"""Phases in which a partition is loaded or dropped, and nothing is computed."""


class Span(NamedTuple):
    """A piece of work of a worker, simulated or recorded; `phase` is what a pipe's recorder calls it."""

    action: Action
    worker: int
    begin: float
    end: float
    phase: str

    @property
    def label(self) -> str:
        """F3 for the forward of micro-batch 3, R3 its recomputation, B3 its backward (I3 and W3 if that is split); load
        and drop of a partition."""
        if self.phase in TRANSFERS:
            return self.phase
        letter = {"recompute": "R", "copy": "copy "}.get(self.phase, self.action.kind.value)
        return f"{letter}{self.action.micro_batch}"


@final
@dataclass(frozen=True)
class Simulation:
    step: float
    """From the beginning of the first action to the end of the last."""
    bubble: float
    """The share of all workers' time in which they are idle."""
    _order: Order
    _costs: Sequence[PartitionCost]
    _checkpointed_counts: Sequence[int]
    _begins: list[list[float]]

    @cached_property
    def spans(self) -> list[Span]:
        """Every piece of work, worker by worker."""
        pieces_of = _pieces_by_action(self._costs, self._checkpointed_counts)
        pieces = [
            [(piece, action) for action in actions for piece in pieces_of(action)] for actions in self._order
        ]
        return [
            Span(action, worker, begin, begin + piece.duration, piece.phase)
            for worker, begins in enumerate(self._begins)
            for (piece, action), begin in zip(pieces[worker], begins, strict=True)
        ]

    @cached_property
    def longest_part(self) -> float:
        """The longest time from the beginning of a worker's first action to the end of its last.

        A step takes that long if workers do not wait for each other between steps. Zero Bubble's bubbles are of it.
        """
        parts: dict[int, tuple[float, float]] = {}
        for span in self.spans:
            begin, end = parts.get(span.worker, (span.begin, span.end))
            parts[span.worker] = min(begin, span.begin), max(end, span.end)
        return max((end - begin for begin, end in parts.values()), default=0.0)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most each partition keeps at once."""
        peaks = partition_peaks(self._order, self._checkpointed_counts)
        return tuple(
            cost.resident_bytes + peak.bytes(cost.saved_bytes, cost.input_bytes)
            for cost, peak in zip(self._costs, peaks, strict=True)
        )


def simulate(
    order: Order,
    costs: Sequence[PartitionCost],
    *,
    checkpointed_counts: Sequence[int] = (),
    cores: int | None = None,
) -> Simulation:
    """`cores` is how many workers can run at once; None: all of them.

    Micro-batches below their partition's stop recompute before their backward; without stops none does. Recomputation
    needs no gradient, so it may run while the gradient is still in transfer.
    """
    stops = checkpointed_counts or [0] * len(costs)
    costs = _without_inner_transfers(order, costs)
    pieces_of = _pieces_by_action(costs, stops)
    work = [list(chain.from_iterable(map(pieces_of, actions))) for actions in order]
    begins = _run(work, min(cores or len(order), len(order)))
    if any(len(begun) < len(pieces) for begun, pieces in zip(begins, work, strict=True)):
        raise ValueError(
            "the order cannot be run: its workers wait for each other, or for an action that is missing"
        )
    step = max(
        (begun[-1] + pieces[-1].duration for begun, pieces in zip(begins, work, strict=True) if pieces),
        default=0.0,
    )
    busy = sum(piece.duration for piece in chain.from_iterable(work))
    bubble = 1 - busy / (len(order) * step) if step else 0.0
    return Simulation(step, bubble, order, costs, stops, begins)


def _without_inner_transfers(order: Order, costs: Sequence[PartitionCost]) -> Sequence[PartitionCost]:
    """The costs without transfers from a partition to the next one on the same worker."""
    worker_of = {action.partition: worker for worker, actions in enumerate(order) for action in actions}
    stays = [worker_of.get(here) == worker_of.get(here + 1) for here in range(len(costs))]
    if not any(stays):
        return costs
    return [replace(cost, transfer=0.0) if inner else cost for cost, inner in zip(costs, stays, strict=True)]


@final
class _Link:
    """A boundary in one direction. Micro-batches cross in ascending order, so a count identifies the next one."""

    __slots__ = ("arrivals", "taken", "transfer", "waiting")

    def __init__(self, transfer: float) -> None:
        self.transfer = transfer
        self.arrivals: list[float] = []
        self.taken = 0
        # A boundary has one worker at its receiving end, so there is at most one to wait.
        self.waiting: tuple[int, float] | None = None
        """The worker that waits for the next tensor, and since when it has been free."""


@final
@dataclass(slots=True)
class _Work:
    """What all micro-batches of one phase on one partition have in common."""

    phase: str
    duration: float
    needs: _Link | None = None
    """For an input from another partition; what its own worker makes exists already, by the worker's order."""
    gives: _Link | None = None


_PiecesOf: TypeAlias = Callable[[Action], tuple[_Work, ...]]


def _pieces_by_action(costs: Sequence[PartitionCost], stops: Sequence[int]) -> _PiecesOf:
    """The pieces of an action: a checkpointed backward has a recomputation before it."""
    outputs = [_Link(cost.transfer) for cost in costs]
    # A gradient crosses the boundary that its input crossed, whose transfer is the previous partition's.
    gradients = [_Link(costs[max(0, partition - 1)].transfer) for partition in range(len(costs))]
    inputs, output_gradients = [None, *outputs[:-1]], [*gradients[1:], None]
    table = [
        (
            (_Work("forward", cost.forward, inputs[partition], outputs[partition]),),
            (_Work("backward", cost.backward, output_gradients[partition], gradients[partition]),),
            (_Work("backward", cost.split[0], output_gradients[partition], gradients[partition]),),
            (_Work("backward", cost.split[1]),),
            (_Work("recompute", cost.recompute),),
        )
        for partition, cost in enumerate(costs)
    ]

    def pieces_of(action: Action) -> tuple[_Work, ...]:
        forward, backward, input_grad, weight_grad, recompute = table[action.partition]
        kind = action.kind
        if kind is Kind.FORWARD:
            return forward
        if kind is Kind.WEIGHT_GRAD:
            return weight_grad
        gradient = backward if kind is Kind.BACKWARD else input_grad
        return recompute + gradient if action.micro_batch < stops[action.partition] else gradient

    return pieces_of


def _run(work: Sequence[Sequence[_Work]], cores: int) -> list[list[float]]:
    """When each piece of work begins; if the order cannot be run to its end, some are missing."""
    begins: list[list[float]] = [[] for _ in work]
    free_cores = [0.0] * cores
    ready: list[tuple[float, int]] = []  # since when a worker can run its next piece

    def line_up(worker: int, free: float) -> None:
        """Make a worker ready for its next piece, or let it wait for the input of that piece."""
        pieces, place = work[worker], len(begins[worker])
        if place == len(pieces):
            return
        link = pieces[place].needs
        if link is None:
            heappush(ready, (free, worker))
        elif link.taken < len(link.arrivals):
            arrival = link.arrivals[link.taken]
            link.taken += 1
            heappush(ready, (free if free > arrival else arrival, worker))
        else:
            link.waiting = worker, free

    for worker in range(len(work)):
        line_up(worker, 0.0)
    # Each piece enters and leaves the heap once: O(pieces x log workers). Ready workers come out by the time since
    # which they have been ready, so cores go to the first that asked.
    while ready:
        since, worker = heappop(ready)
        piece = work[worker][len(begins[worker])]
        begin = since if since > free_cores[0] else free_cores[0]
        end = begin + piece.duration
        heapreplace(free_cores, end)
        begins[worker].append(begin)
        link = piece.gives
        if link is not None:
            link.arrivals.append(end + link.transfer)
            if link.waiting is not None:
                waiting, link.waiting = link.waiting, None
                line_up(*waiting)
        line_up(worker, end)
    return begins


class Live(NamedTuple):
    """The micro-batches of a partition that are alive at one moment, or by how many their number changes."""

    graphs: float
    """Micro-batches with everything their backward needs; a fraction if only a part of it is kept."""
    inputs: int
    """Checkpointed ones, whose input is kept until their backward has ended."""

    def bytes(self, cost: PartitionCost) -> float:
        return self.graphs * cost.saved_bytes + self.inputs * cost.input_bytes


@cache
def live_change(kind: Kind, *, is_checkpointed: bool, kept: float = 1) -> tuple[Live, Live]:
    """What an action adds to what its partition keeps alive while it runs, and once it has ended.

    kept: the share of a graph that is kept between input gradient and weight gradient; gpipe's engines keep all of it.
    """
    recomputed = int(is_checkpointed)
    if kind is Kind.FORWARD:
        added = Live(1 - recomputed, recomputed)
        return added, added
    if kind is Kind.WEIGHT_GRAD:
        return Live(0, 0), Live(-kept, -recomputed)
    if kind is Kind.INPUT_GRAD:
        return Live(recomputed, 0), Live(recomputed - (1 - kept), 0)
    return Live(recomputed, 0), Live(recomputed - 1, -recomputed)


@final
@dataclass(frozen=True)
class PartitionPeaks:
    """What one partition keeps at the moments that can be the worst."""

    moments: tuple[Live, ...]
    """None exceeds another in both numbers; which of them is the worst depends on the bytes."""

    def bytes(self, graph: int, input: int) -> int:
        """At the worst moment, if one graph and one input have that many bytes."""
        return int(max(moment.graphs * graph + moment.inputs * input for moment in self.moments))


def partition_peaks(order: Order, checkpointed_counts: Sequence[int] = ()) -> list[PartitionPeaks]:
    """For each partition; micro-batches below its stop are checkpointed, without stops none is.

    One worker runs a partition's actions in one order, so this does not depend on how long anything takes.
    """
    by_partition: dict[int, list[Action]] = {}
    for actions in order:
        for action in actions:
            by_partition.setdefault(action.partition, []).append(action)
    stops = checkpointed_counts or [0] * len(by_partition)
    return [_peaks(actions, stops[partition]) for partition, actions in sorted(by_partition.items())]


def _peaks(actions: Iterable[Action], checkpoint_stop: int) -> PartitionPeaks:
    graphs, inputs = 0.0, 0
    moments = set()
    for action in actions:
        running, ended = live_change(action.kind, is_checkpointed=action.micro_batch < checkpoint_stop)
        moments.add((graphs + running.graphs, inputs + running.inputs))
        graphs, inputs = graphs + ended.graphs, inputs + ended.inputs
    front: list[Live] = []
    # Most graphs first, so a moment belongs to the Pareto front only if it has more inputs than all before it.
    for moment in sorted(moments, reverse=True):
        if not front or moment[1] > front[-1].inputs:
            front.append(Live(*moment))
    return PartitionPeaks(tuple(front))


def peaks_of_live(live: int, chunks: int, checkpoint_stop: int) -> PartitionPeaks:
    """The peaks of a partition that keeps `live` micro-batches alive; with `except_last` up to one graph too many."""
    if checkpoint_stop == 0:
        return PartitionPeaks((Live(live, 0),))
    recomputing = Live(1, live)
    if checkpoint_stop == chunks or live == 1:
        return PartitionPeaks((recomputing,))
    # The last micro-batch keeps its graph from the start, while an earlier one is recomputed.
    last = Live(2, live - 1)
    return PartitionPeaks((last, recomputing) if live < chunks else (last,))
