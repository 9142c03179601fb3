"""Searches for the order with the shortest step: schedules that exist, list scheduling, and local search on its policy.

Deterministic up to the deadline: the effort is a number of actions, and random numbers come from a fixed seed.

V-Half and V-Min (arXiv 2405.15362), from which the search starts as well, have two partitions per device, there and
back, with half and a third of the memory. All actions of one micro-batch form a block, which repeats every period.
Times are in units of one action: a period has six, a forward, an input gradient and a weight gradient of each of the
two partitions. The sooner the next device continues (`hops`), the fewer micro-batches are alive.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import final

from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.list_schedule import Policy, Scheduled, list_schedule
from gpipe_cli.plan.order_problem import OrderProblem, step_bound
from gpipe_cli.schedule import names, order, traits
from gpipe_cli.schedule.action import Action, Kind, Order
from gpipe_cli.schedule.orders import ZERO_BUBBLE, ZERO_BUBBLE_V, one_by_one, zero_bubble_v

EFFORT = 300_000
"""Actions scheduled in one search: some seconds. The search ends earlier if it reaches the lower bound."""
SEARCHED = "searched"
_TOLERANCE = 1e-9
"""Steps that differ by less are equal."""
_STARTS = ((0.5, 1.0, 1.0, False), (2.0, 1.0, 0.25, True), (0.0, 1.0, 1.0, False), (1.0, 0.5, 0.5, False))
"""Window, patience, patience at the end and protection of the last gradient: what was best for published costs."""
_V_STARTS = (
    (0.5, 0.75, 0.25, True),
    (1.0, 1.0, 1.0, False),
    (1.0, 0.5, 0.5, False),
    (0.25, 1.0, 1.0, False),
    (2.0, 1.0, 0.25, True),
)
JOINING_ROUNDS, JOINING_EFFORT = 2, 400_000
"""The rounds in which split backwards are made whole, and the actions simulated for it: about a second."""
_PERIOD = 6
_HOPS = {"v_half": (2, 1, 2, 1), "v_min": (1, 1, 1, 1)}
"""From device to device: forward there, forward back, backward there, backward back."""

Block = list[list[tuple[int, Kind, int]]]
"""For each device the begin, kind and partition of the actions of the first micro-batch."""


@final
@dataclass(frozen=True)
class OrderResult:
    order: Order
    step: float
    """In the unit of the costs."""
    bound: float
    """No order takes less."""
    bubble: float
    """The idle share of the busiest worker's step."""
    origin: str
    """The schedule that the order is from, or `searched`."""

    @property
    def gap(self) -> float:
        """The most by which the step could be shorter, as a share of the bound."""
        return self.step / self.bound - 1


def search_orders(
    problem: OrderProblem, effort: int = EFFORT, least_gain: float = 0.0, deadline: float = inf
) -> OrderResult:
    """The best order found; with `least_gain=0` no schedule that fits the same placement and memory is better.

    least_gain: the share by which an order must be shorter than a simpler one to be preferred to it. deadline: a time
    of `time.monotonic` from which on nothing more is tried once there is an order.
    """
    bound = step_bound(problem)
    best: tuple[float, Order, str] | None = None
    for name, candidate in _candidates(problem, effort, bound, deadline):
        # Simulated: without the pauses that a policy made, an order may take less time than when it was found.
        step = problem.step_of(candidate)
        if best is None or step < best[0] * (1 - least_gain) - _TOLERANCE:
            best = step, candidate, name
    if best is None:
        raise ConfigError(
            "no order fits the memory of the devices; give device_memory more, or recompute with "
            "checkpoint=always"
        )
    step, found, origin = best
    return OrderResult(found, step, bound, 1 - problem.busiest(found) / step, origin)


def _candidates(
    problem: OrderProblem, effort: int, bound: float, deadline: float
) -> Iterator[tuple[str, Order]]:
    """Orders that fit the memory, by name, simple ones first."""
    existing = [(name, made) for name, made in existing_orders(problem) if problem.fits(made)]
    yield from existing
    searched = _Search(problem, effort, bound, deadline).best()
    split = [made for name, made in existing if name in (ZERO_BUBBLE, ZERO_BUBBLE_V)]
    for made in [*split, *([] if searched is None else [searched.order])]:
        partly_whole = with_whole_backwards(problem, made, deadline)
        if problem.fits(partly_whole):
            yield SEARCHED, partly_whole
        if partly_whole != made and problem.fits(made):
            yield SEARCHED, made


def memory_curve(
    problem: OrderProblem, shares: Sequence[float], effort: int = EFFORT, deadline: float = inf
) -> list[tuple[float, float]]:
    """The bubble against memory: for each share of the problem's memory, the bubble of the best order within it.

    Shares for which no order fits are left out. More memory never gives a larger bubble.
    """
    points: list[tuple[float, float]] = []
    for share in sorted(shares):
        limited = replace(problem, memory=tuple(share * limit for limit in problem.memory))
        try:
            bubble = search_orders(limited, effort, deadline=deadline).bubble
        except ConfigError:
            continue
        points.append((share, min([bubble, *(other for _, other in points)])))
    return points


@final
class _Search:
    def __init__(self, problem: OrderProblem, effort: int, bound: float, deadline: float) -> None:
        self._problem, self._deadline = problem, deadline
        self._actions = 3 * problem.partitions * problem.chunks
        self._total = self._effort = effort
        self._bound = bound
        self._random = random.Random(0)
        self._tried: set[Policy] = set()
        self._best: tuple[float, Policy, Scheduled] | None = None

    def best(self) -> Scheduled | None:
        for policy in self._starts():
            # A large problem leaves most starts out: improving the first ones is worth more.
            if self._best is None or self._effort > 0.8 * self._total:
                self._try(policy)
        while self._best is not None and self._effort > 0 and self._best[0] > self._bound * (1 + _TOLERANCE):
            if time.monotonic() > self._deadline:
                break
            _, policy, scheduled = self._best
            self._try(self._changed(policy, scheduled))
        return None if self._best is None else self._best[2]

    def _try(self, policy: Policy) -> None:
        self._effort -= self._actions
        if policy in self._tried or self._effort <= -self._actions:
            return
        self._tried.add(policy)
        scheduled = list_schedule(self._problem, policy)
        if scheduled is None:
            return
        step = scheduled.step(synchronized=self._problem.synchronized)
        if self._problem.shares_cores:
            # List scheduling lets all workers run at once.
            step = self._problem.step_of(scheduled.order)
            self._effort -= self._actions
        # Of equal ones the newest: so local search moves on over plateaus.
        if self._best is None or step <= self._best[0]:
            self._best = step, policy, scheduled

    def _starts(self) -> Iterator[Policy]:
        """The longer the hops, the more micro-batches are alive; those of the memory limit come first."""
        alive = self._alive()
        workers = self._problem.devices
        shapes: list[tuple[float, ...]]
        starts = _STARTS if self._problem.partitions == workers else _V_STARTS
        if self._problem.partitions == workers:
            shapes = [
                (total / 2, total / 2)
                for total in (1.005 * alive, 1.02 * alive, alive, 0.95 * alive, 1.0, 0.8)
            ]
        elif self._problem.partitions > 2 * workers:
            passes = -(-self._problem.partitions // workers)
            shapes = [(alive * hop,) * (2 * passes) for hop in (0.5, 0.7, 1.0)]
        else:
            pairs = ((3, 3, 3, 3), (2.7, 2.7, 2.7, 2.7), (4, 2, 4, 2), (2, 4, 2, 4), (4, 2, 4, 1))
            shapes = [tuple(alive * hop / 6 for hop in hops) for hops in pairs]
        for (window, patience, at_end, protects), hops in product(starts, shapes):
            yield Policy(tuple(hops), window, (patience,) * workers, (at_end,) * workers, protects)

    def _alive(self) -> float:
        """How many micro-batches per device the memory allows, at most twice as many as devices."""
        problem = self._problem
        if not problem.memory:
            return 2.0
        needs = [sum(problem.costs[one].saved_bytes for one in own) for own in problem.own]
        fitting = min(
            limit / need if need else 2.0 * problem.devices
            for limit, need in zip(problem.memory, needs, strict=True)
        )
        return max(0.3, min(2.0, fitting / problem.devices))

    def _changed(self, policy: Policy, scheduled: Scheduled) -> Policy:
        """A neighbor of the policy."""
        draw = self._random
        move = draw.random()
        if move < 0.55:
            changed = self._changed_patience(policy.patience, scheduled)
            if move < 0.35:
                return replace(policy, patience=changed, patience_at_end=changed)
            return (
                replace(policy, patience=changed) if move < 0.45 else replace(policy, patience_at_end=changed)
            )
        if move < 0.8:
            change = draw.choice((-0.1, -0.02, -0.005, 0.005, 0.02, 0.1))
            chosen = draw.choice((None, *range(len(policy.hops))))  # None: all of them
            hops = (
                max(0.02, hop + change) if chosen in (None, place) else hop
                for place, hop in enumerate(policy.hops)
            )
            return replace(policy, hops=tuple(hops))
        if move < 0.95:
            return replace(policy, window=max(0.0, policy.window + draw.choice((-0.5, -0.25, 0.25, 0.5))))
        return replace(policy, protects_last=not policy.protects_last)

    def _changed_patience(self, patience: tuple[float, ...], scheduled: Scheduled) -> tuple[float, ...]:
        """Change the patience of some neighboring workers, or of those that have the most time to wait."""
        draw, workers = self._random, len(patience)
        if draw.random() < 0.4:
            first, count = draw.randrange(workers), draw.choice((1, 2, 4))
            value = draw.choice((0.0, 0.25, 0.5, 0.75, 1.0))
            return tuple(
                value if first <= worker < first + count else old for worker, old in enumerate(patience)
            )
        parts = [end - begin for begin, end in zip(scheduled.begins, scheduled.ends, strict=True)]
        longest = sorted(parts)[draw.randrange(workers)]
        return tuple(
            draw.choice((0.0, 0.25, 0.5)) if part <= longest and draw.random() < 0.7 else old
            for part, old in zip(parts, patience, strict=True)
        )


def v_shaped(devices: int) -> tuple[int, ...]:
    """The workers of two partitions per device, there and back: the first device has the first and the last one."""
    return (*range(devices), *reversed(range(devices)))


def existing_orders(problem: OrderProblem) -> Iterator[tuple[str, Order]]:
    """The schedules that place partitions as the problem does, those with whole backwards first."""
    partitions, devices = problem.partitions, problem.devices
    if problem.workers == v_shaped(devices) and devices > 1:
        yield ZERO_BUBBLE_V, zero_bubble_v(partitions, problem.chunks, devices)
        yield from v_orders(problem.chunks, devices)
    dealt = tuple(partition % devices for partition in range(partitions))
    if problem.workers == dealt:
        yield "one by one", one_by_one(partitions, problem.chunks, devices)
    for name in sorted(names(), key=lambda name: (traits(name).splits_backward, name)):
        several = traits(name).several_per_device
        if problem.workers == dealt and several == (partitions > devices):
            yield name, order(name, partitions, problem.chunks, devices)


def v_orders(chunks: int, devices: int) -> Iterator[tuple[str, Order]]:
    """Each by its name; several have the same one, and differ in memory and in how they bear unequal times."""
    for name, hops in _HOPS.items():
        for block in _blocks(hops, devices):
            yield name, tuple(_repeated(actions, chunks) for actions in block)


def _repeated(actions: Sequence[tuple[int, Kind, int]], chunks: int) -> tuple[Action, ...]:
    begins = sorted(
        (begin + _PERIOD * micro_batch, Action(kind, partition, micro_batch))
        for begin, kind, partition in actions
        for micro_batch in range(chunks)
    )
    return tuple(action for _, action in begins)


def _blocks(hops: tuple[int, ...], devices: int) -> Iterator[Block]:
    """Blocks whose waits at the two turns keep a device's actions apart from those of other micro-batches."""
    for waits in product(range(1, _PERIOD), repeat=2):
        block = [_with_weight_grads(begins) for begins in _begins(hops, waits, devices)]
        if all(block):
            yield block


def _begins(
    hops: tuple[int, ...], waits: tuple[int, ...], devices: int
) -> Iterator[list[tuple[int, Kind, int]]]:
    there, back, grad_there, grad_back = hops
    last = devices - 1
    turn = last * there + waits[0]
    loss = turn + last * back + 1
    grad_turn = loss + last * grad_there + waits[1]
    for device in range(devices):
        outward, inward = device, 2 * devices - 1 - device
        yield [
            (device * there, Kind.FORWARD, outward),
            (turn + (last - device) * back, Kind.FORWARD, inward),
            (loss + device * grad_there, Kind.INPUT_GRAD, inward),
            (grad_turn + (last - device) * grad_back, Kind.INPUT_GRAD, outward),
        ]


def _with_weight_grads(actions: list[tuple[int, Kind, int]]) -> list[tuple[int, Kind, int]]:
    """With weight gradients in the places that are free in every period; empty if two actions meet."""
    taken = {begin % _PERIOD for begin, _, _ in actions}
    if len(taken) < len(actions):
        return []
    complete = list(actions)
    for begin, kind, partition in actions:
        if kind is Kind.INPUT_GRAD:
            free = next(time for time in range(begin + 1, begin + _PERIOD) if time % _PERIOD not in taken)
            taken.add(free % _PERIOD)
            complete.append((free, Kind.WEIGHT_GRAD, partition))
    return complete


def with_whole_backwards(problem: OrderProblem, order: Order, deadline: float = inf) -> Order:
    """The order with as many whole backwards as do not lengthen the step; as it is if halves cost nothing.

    The two halves of a backward take longer than the whole one, on some devices much longer. Only the backwards at the
    end of a step gain much from being split, because earlier partitions wait for their input gradients and nothing else
    is left to do. So each partition splits the backwards of its last micro-batches, as many as shorten the step most.
    """
    partitions = [partition for partition in range(problem.partitions) if _can_gain(problem, partition)]
    whole = [0] * problem.partitions
    best = problem.step_of(order)
    trials = JOINING_EFFORT // max(1, sum(map(len, order)))
    for _ in range(JOINING_ROUNDS):
        before = list(whole)
        # A later partition's gradients are what the earlier ones wait for.
        for partition in reversed(partitions):
            for number in _counts(problem.chunks):
                if number == whole[partition] or trials <= 0 or time.monotonic() > deadline:
                    continue
                trials -= 1
                trial = [*whole[:partition], number, *whole[partition + 1 :]]
                step = problem.step_of(with_joined_backwards(order, trial))
                if step < best / (1 + _TOLERANCE) or (
                    step <= best * (1 + _TOLERANCE) and number > whole[partition]
                ):
                    best, whole = min(step, best), trial
        if whole == before:
            break
    return with_joined_backwards(order, whole)


def with_joined_backwards(order: Order, whole: Sequence[int]) -> Order:
    """The order with the backwards of the first `whole[partition]` micro-batches in one piece, where `I` was."""
    return tuple(
        tuple(
            Action(Kind.BACKWARD, action.partition, action.micro_batch)
            if action.kind is Kind.INPUT_GRAD and action.micro_batch < whole[action.partition]
            else action
            for action in actions
            if action.kind is not Kind.WEIGHT_GRAD or action.micro_batch >= whole[action.partition]
        )
        for actions in order
    )


def _can_gain(problem: OrderProblem, partition: int) -> bool:
    cost = problem.costs[partition]
    input_grad, weight_grad = cost.split
    # Without an input gradient to compute, the weight gradient is the whole backward, and an action is saved.
    return cost.backward < (input_grad + weight_grad) / (1 + _TOLERANCE) or input_grad == 0.0


def _counts(chunks: int) -> list[int]:
    """How many backwards may be whole, most first: all, all but 1, 2, 4, ..., none."""
    powers = [2**power for power in range(chunks.bit_length())]
    return sorted({chunks, *(chunks - power for power in powers if power <= chunks), 0}, reverse=True)
