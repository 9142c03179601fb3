"""Proves an order legal.

Legal: each partition belongs to one worker; each micro-batch is forwarded once and backwarded once (in one
piece or in two) on each partition, in ascending order, so that queues between partitions are first in,
first out and gradients add up in one order; and workers that wait for what they need never wait in a circle.
Knows nothing of durations (see `simulate`) and memory (see `memory`), nor of who made the order.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator
from typing import final

from gpipe_cli.schedule.action import Action, Kind, Order


@final
class IllegalOrder(ValueError):
    """An order that cannot be run, or not rightly; the text names the action at fault."""


def check(order: Order, partitions: int, chunks: int) -> None:
    """Raise `IllegalOrder` unless the order runs `chunks` micro-batches through `partitions` partitions."""
    _check_placement(order)
    _check_complete(order, partitions, chunks)
    for actions in order:
        _check_ascending(actions)
    for _ in walk(order):
        pass


def walk(order: Order) -> Iterator[Action]:
    """All actions, each after those it waits for: the workers in turn, each as far as it gets."""
    everything = _everything(order)
    done: set[Action] = set()
    rest = [list(reversed(actions)) for actions in order]
    while any(rest):
        before = len(done)
        for actions in rest:
            while actions and done.issuperset(dependencies(actions[-1], everything)):
                done.add(actions[-1])
                yield actions.pop()
        if len(done) == before:
            raise IllegalOrder(
                "the workers wait for each other: " + "; ".join(_waits(rest, everything, done))
            )


def dependencies(action: Action, everything: Collection[Action]) -> list[Action]:
    """The actions among `everything` that must have ended before this one can begin."""
    partition, micro_batch = action.partition, action.micro_batch
    match action.kind:
        case Kind.FORWARD:
            candidates = [Action(Kind.FORWARD, partition - 1, micro_batch)]
        case Kind.WEIGHT_GRAD:
            candidates = [Action(Kind.INPUT_GRAD, partition, micro_batch)]
        case Kind.BACKWARD | Kind.INPUT_GRAD:
            candidates = [
                Action(Kind.FORWARD, partition, micro_batch),
                Action(Kind.BACKWARD, partition + 1, micro_batch),
                Action(Kind.INPUT_GRAD, partition + 1, micro_batch),
            ]
    return [candidate for candidate in candidates if candidate in everything]


def _everything(order: Order) -> frozenset[Action]:
    return frozenset(itertools.chain.from_iterable(order))


def _check_placement(order: Order) -> None:
    worker_of: dict[int, int] = {}
    for worker, actions in enumerate(order):
        for action in actions:
            owner = worker_of.setdefault(action.partition, worker)
            if owner != worker:
                raise IllegalOrder(f"{action} is on worker {worker}, its partition is on worker {owner}")


def _check_complete(order: Order, partitions: int, chunks: int) -> None:
    counts = Counter(itertools.chain.from_iterable(order))
    for action, count in counts.items():
        if count > 1:
            raise IllegalOrder(f"{action} stands in the order {count} times")
    expected = {
        Action(kind, partition, micro_batch)
        for partition in range(partitions)
        for kind in (Kind.FORWARD, *_backward_kinds(partition, counts))
        for micro_batch in range(chunks)
    }
    if missing := expected - counts.keys():
        raise IllegalOrder(f"{_first(missing)} is missing")
    if surplus := counts.keys() - expected:
        raise IllegalOrder(f"{_first(surplus)} is beyond {partitions} partitions and {chunks} chunks")


def _backward_kinds(partition: int, actions: Collection[Action]) -> tuple[Kind, ...]:
    """A partition's backward is in two pieces if any of them is."""
    split = (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    is_split = any(action.partition == partition and action.kind in split for action in actions)
    return split if is_split else (Kind.BACKWARD,)


def _check_ascending(actions: tuple[Action, ...]) -> None:
    latest: dict[tuple[Kind, int], Action] = {}
    for action in actions:
        previous = latest.setdefault((action.kind, action.partition), action)
        if action.micro_batch < previous.micro_batch:
            raise IllegalOrder(f"{action} comes after {previous}, micro-batches must ascend")
        latest[action.kind, action.partition] = action


def _first(actions: Collection[Action]) -> Action:
    return min(actions, key=lambda action: (action.partition, action.micro_batch, action.kind.value))


def _waits(rest: list[list[Action]], everything: Collection[Action], done: set[Action]) -> Iterator[str]:
    for worker, actions in enumerate(rest):
        if actions:
            missing = next(needed for needed in dependencies(actions[-1], everything) if needed not in done)
            yield f"worker {worker} needs {missing} for {actions[-1]}"
