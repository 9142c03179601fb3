"""List scheduling: builds the order of forwards, input gradients and weight gradients from costs, memory and a policy.

A worker that is free runs, of the forwards and input gradients that it can run now, the one that the policy wants
first. Weight gradients, which nobody waits for, fill the time in which it would wait, or make room when its memory is
full. Within a partition each kind ascends, so every order is one that `check` accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import final

from gpipe_cli.plan.order_problem import OrderProblem
from gpipe_cli.schedule.action import Action, Kind, Order

FORWARD, INPUT_GRAD, WEIGHT_GRAD = range(3)
_KINDS = (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
_EPSILON = 1e-9


@final
@dataclass(frozen=True)
class Policy:
    """What list scheduling decides by; times are in periods, the time of a micro-batch on the busiest worker."""

    hops: tuple[float, ...]
    """How much later the next partition should run a micro-batch: forward per pass over the workers, then backward.
    The longer, the more micro-batches are alive, and the less a delay matters."""
    window: float
    """How far a worker may prefer an action that can run to an earlier one that cannot yet."""
    patience: tuple[float, ...]
    """Per worker, the share of a weight gradient by which it may delay the next action rather than wait for it."""
    patience_at_end: tuple[float, ...]
    """Per worker, the patience that it has once it has run all its forwards."""
    protects_last: bool = False
    """Whether no weight gradient may delay the last input gradient of a worker, which all earlier workers wait for."""


@final
@dataclass(frozen=True)
class Scheduled:
    actions: list[list[tuple[int, int, int]]]
    """By worker: kind, partition, micro-batch."""
    begins: list[float]
    ends: list[float]

    def step(self, *, synchronized: bool) -> float:
        if synchronized:
            return max(self.ends)
        return max(end - begin for begin, end in zip(self.begins, self.ends, strict=True))

    @property
    def order(self) -> Order:
        return tuple(
            tuple(Action(_KINDS[kind], partition, number) for kind, partition, number in actions)
            for actions in self.actions
        )


def list_schedule(problem: OrderProblem, policy: Policy) -> Scheduled | None:
    """None if the memory is too small for the policy's order."""
    return _ListSchedule(problem, policy).run()


@final
class _ListSchedule:
    def __init__(self, problem: OrderProblem, policy: Policy) -> None:
        self._problem = problem
        self._policy = policy
        self._period = max(problem.work) / problem.chunks
        self._window = policy.window * self._period
        self._forward_targets, self._grad_targets = _targets(problem, policy, self._period)
        partitions, workers = range(problem.partitions), range(problem.devices)
        self._done = [[0, 0, 0] for _ in partitions]
        # When inputs and gradients of the outputs arrive; the first partition has all its inputs.
        self._inputs: list[list[float]] = [[] for _ in partitions]
        self._inputs[0] = [0.0] * problem.chunks
        self._gradients: list[list[float]] = [[] for _ in partitions]
        self._parts = [cost.split for cost in problem.costs]
        self._limits = list(problem.memory) or [inf for _ in workers]
        self._used = [0.0 for _ in partitions]
        # What an action adds to it, by partition, kind and whether the micro-batch is checkpointed.
        self._kept = [
            [(changes[kind, False][1], changes[kind, True][1]) for kind in _KINDS]
            for changes in problem.kept_changes
        ]
        self._reserves = _reserves(problem)
        self._free = [0.0 for _ in workers]
        self._begins: list[float | None] = [None for _ in workers]
        self._actions: list[list[tuple[int, int, int]]] = [[] for _ in workers]

    def run(self) -> Scheduled | None:
        # Workers come out by the time at which they are free, or at which what they wait for arrives.
        heap = [(0.0, worker) for worker in range(self._problem.devices)]
        waiting = [False] * self._problem.devices
        while heap:
            now, worker = heappop(heap)
            if now < self._free[worker]:
                continue
            kind, partition, arrival = self._pick(worker, now)
            if kind is None:
                waiting[worker] = True
                if arrival < inf:
                    heappush(heap, (arrival, worker))
                continue
            waiting[worker] = False
            receiver = self._start(kind, partition, worker, now)
            heappush(heap, (self._free[worker], worker))
            if receiver is not None and waiting[receiver]:
                heappush(heap, (max(self._free[receiver], now), receiver))
        total = sum(map(len, self._actions))
        if total < 3 * self._problem.partitions * self._problem.chunks:
            return None
        begins = [begin or 0.0 for begin in self._begins]
        return Scheduled(self._actions, begins, self._free)

    def _pick(self, worker: int, now: float) -> tuple[int | None, int, float]:
        """What the worker does now: kind and partition; or None, and when the first thing it waits for arrives."""
        waiting_weights = self._oldest_weights(worker)
        soonest, first = inf, None
        ahead = False
        for target, kind, partition, arrival in self._candidates(worker):
            if kind == FORWARD:
                ahead = True
                if not self._has_room(worker, partition):
                    if arrival <= now and waiting_weights is not None:
                        return WEIGHT_GRAD, waiting_weights, now
                    continue
            if first is None:
                first = target
            elif target > first + self._window:
                break
            if arrival <= now:
                return kind, partition, now
            soonest = min(soonest, arrival)
        if waiting_weights is not None:
            duration = self._parts[waiting_weights][1]
            if now + duration - soonest <= self._patience(worker, is_ahead=ahead) * duration:
                return WEIGHT_GRAD, waiting_weights, now
        return None, 0, soonest

    def _patience(self, worker: int, *, is_ahead: bool) -> float:
        policy = self._policy
        if is_ahead:
            return policy.patience[worker]
        own = self._problem.own[worker]
        if policy.protects_last and self._done[own[0]][INPUT_GRAD] == self._problem.chunks - 1:
            return 0.0
        return policy.patience_at_end[worker]

    def _candidates(self, worker: int) -> list[tuple[float, int, int, float]]:
        """The next forward and the next input gradient of each partition: target, kind, partition, arrival."""
        candidates = []
        period, chunks = self._period, self._problem.chunks
        for partition in self._problem.own[worker]:
            forwards, grads, _ = self._done[partition]
            if forwards < chunks:
                arrivals = self._inputs[partition]
                arrival = arrivals[forwards] if forwards < len(arrivals) else inf
                target = self._forward_targets[partition] + forwards * period
                candidates.append((target, FORWARD, partition, arrival))
            if grads < forwards:
                arrivals = self._gradients[partition]
                arrival = arrivals[grads] if grads < len(arrivals) else inf
                if grads < self._problem.stops[partition]:
                    # Recomputation runs while the gradient is in transfer.
                    arrival -= self._problem.costs[partition].recompute
                candidates.append(
                    (self._grad_targets[partition] + grads * period, INPUT_GRAD, partition, arrival)
                )
        candidates.sort()
        return candidates

    def _oldest_weights(self, worker: int) -> int | None:
        """The partition whose weight gradient has waited longest."""
        oldest, partition = inf, None
        for own in self._problem.own[worker]:
            _, grads, weights = self._done[own]
            if weights < grads and (target := self._grad_targets[own] + weights * self._period) < oldest:
                oldest, partition = target, own
        return partition

    def _has_room(self, worker: int, partition: int) -> bool:
        limit = self._limits[worker]
        if limit == inf:
            return True
        problem, forwards = self._problem, self._done[partition][FORWARD]
        needed = self._kept[partition][FORWARD][forwards < problem.stops[partition]]
        used = lower = 0.0
        for own in problem.own[worker]:
            used += self._used[own]
            if own <= partition:
                lower += self._used[own]
        # Early partitions leave room for a micro-batch on each later one, or none could ever reach its backward.
        return max(used, lower + self._reserves[partition]) + needed <= limit + _EPSILON

    def _start(self, kind: int, partition: int, worker: int, now: float) -> int | None:
        """Run the action; the worker that receives what it makes, if any."""
        problem, cost = self._problem, self._problem.costs[partition]
        number = self._done[partition][kind]
        self._used[partition] += self._kept[partition][kind][number < problem.stops[partition]]
        receiver = None
        if kind == FORWARD:
            end = now + cost.forward
            if partition + 1 < problem.partitions:
                self._inputs[partition + 1].append(end + problem.transfers[partition])
                receiver = problem.workers[partition + 1]
            else:
                self._gradients[partition].append(end)
        elif kind == INPUT_GRAD:
            recomputed = now + (cost.recompute if number < problem.stops[partition] else 0.0)
            end = max(recomputed, self._gradients[partition][number]) + self._parts[partition][0]
            if partition:
                self._gradients[partition - 1].append(end + problem.transfers[partition - 1])
                receiver = problem.workers[partition - 1]
        else:
            end = now + self._parts[partition][1]
        self._done[partition][kind] += 1
        self._actions[worker].append((kind, partition, number))
        if self._begins[worker] is None:
            self._begins[worker] = now
        self._free[worker] = end
        return receiver if receiver != worker else None


def _reserves(problem: OrderProblem) -> list[float]:
    """For each partition the room that it leaves: a graph of each later partition of its worker, and of its own."""
    reserves = [0.0] * problem.partitions
    for own in problem.own:
        later = 0.0
        for partition in reversed(own):
            cost, recomputes = problem.costs[partition], problem.stops[partition] > 0
            # Recomputation needs room for a graph besides the inputs.
            reserves[partition] = later + (cost.saved_bytes if recomputes else 0.0)
            later += cost.saved_bytes + (cost.input_bytes if recomputes else 0.0)
    return reserves


def _targets(problem: OrderProblem, policy: Policy, period: float) -> tuple[list[float], list[float]]:
    """When each partition should run the forward and the input gradient of the first micro-batch."""
    passes = len(policy.hops) // 2
    forwards, grads = [], [0.0] * problem.partitions
    time = 0.0
    for partition, cost in enumerate(problem.costs):
        forwards.append(time)
        time += _hop(problem, partition, partition + 1, policy.hops[:passes], cost.forward, period)
    time = forwards[-1] + problem.costs[-1].forward
    for partition in reversed(range(problem.partitions)):
        grads[partition] = time
        backward = tuple(reversed(policy.hops[passes:]))
        time += _hop(problem, partition, partition - 1, backward, problem.costs[partition].split[0], period)
    return forwards, grads


def _hop(
    problem: OrderProblem,
    partition: int,
    following: int,
    hops: Sequence[float],
    duration: float,
    period: float,
) -> float:
    stays = 0 <= following < problem.partitions and problem.workers[partition] == problem.workers[following]
    return duration if stays else hops[partition // problem.devices] * period
