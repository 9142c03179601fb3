"""Proves an order legal: `gpipe_cli.schedule.order` proves every order that it makes.

In a legal order each partition belongs to one worker; each partition runs the forward and the backward of every
micro-batch once, in ascending order, so that queues between partitions are first in, first out and gradients are always
summed in the same order; and workers that wait for their inputs never wait in a circle. Each backward may be in one
piece or in two.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import final

from gpipe_cli.errors import ConfigError
from gpipe_cli.schedule.action import Action, Kind, Order

HALVES = (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
MAX_NAMED_WORKERS = 4
"""How many of the workers that wait for each other a message names; a file may have thousands."""


@final
class IllegalOrder(ConfigError, ValueError):
    """An order that cannot be run, or not correctly; the message names the action at fault."""


def check_order(order: Order, partitions: int, chunks: int, name: str = "") -> None:
    """Raise `IllegalOrder` unless the order runs `chunks` micro-batches through `partitions` partitions.

    name: of the schedule or its file, for the message. The time is proportional to the number of actions: an executor
    needs thousands of them, a planner up to a million.
    """
    fault = _incomplete(order, partitions, chunks) or _circular(order, partitions)
    if fault:
        raise IllegalOrder(f"{name}: {fault}" if name else fault)


_PARTS = ((Kind.FORWARD,), (Kind.BACKWARD, Kind.INPUT_GRAD), (Kind.BACKWARD, Kind.WEIGHT_GRAD))
"""What every partition does with every micro-batch, and the kinds of actions that do it."""
_PARTS_OF = {kind: [part for part, kinds in enumerate(_PARTS) if kind in kinds] for kind in Kind}


def _incomplete(order: Order, partitions: int, chunks: int) -> str:
    """What is wrong with the actions of a worker, or with their number; empty if nothing is."""
    done = [[0] * len(_PARTS) for _ in range(partitions)]
    worker_of: dict[int, int] = {}
    for worker, actions in enumerate(order):
        if not actions:
            return f"worker {worker} has no actions"
        for action in actions:
            partition, micro_batch = action.partition, action.micro_batch
            if not (0 <= partition < partitions and 0 <= micro_batch < chunks):
                return f"{action} is beyond {partitions} partitions and {chunks} chunks"
            if (owner := worker_of.setdefault(partition, worker)) != worker:
                return f"{action} is on worker {worker}, its partition is on worker {owner}"
            for part in _PARTS_OF[action.kind]:
                if micro_batch != done[partition][part]:
                    return _out_of_turn(action, part, done[partition][part], actions)
                done[partition][part] += 1
    for partition, counts in enumerate(done):
        for part, count in enumerate(counts):
            if count < chunks:
                actions = order[worker_of[partition]] if partition in worker_of else ()
                return f"{_missing(partition, part, count, actions)} is missing"
    return ""


def _out_of_turn(action: Action, part: int, due: int, actions: Sequence[Action]) -> str:
    """Why the action may not come when this part of the micro-batch `due` is next."""
    if action.micro_batch < due:
        times = actions.count(action)
        return f"{action} stands in the order {times} times" if times > 1 else f"{action} is done already"
    skipped = [Action(kind, action.partition, due) for kind in _PARTS[part]]
    for later in skipped:
        if later in actions:
            return f"{later} comes after {action}, micro-batches must ascend"
    return f"{_missing(action.partition, part, due, actions)} is missing"


def _missing(partition: int, part: int, micro_batch: int, actions: Sequence[Action]) -> Action:
    """The action that is not there: half a backward, if the other half or another split one is there."""
    whole, half = _PARTS[part][0], _PARTS[part][-1]
    splits = any(each.partition == partition and each.kind in HALVES for each in actions)
    return Action(half if splits else whole, partition, micro_batch)


def _circular(order: Order, partitions: int) -> str:
    """Which workers wait for each other, and for what; empty if every worker reaches its end."""
    # As micro-batches ascend, the number of those done tells which ones are done. The extra element at the end, also
    # reached as index -1, stands for the outer ends of the pipeline, which never wait.
    forwards, gradients = [0] * (partitions + 1), [0] * (partitions + 1)
    forwards[-1] = gradients[-1] = sys.maxsize

    def missing(action: Action) -> str:
        """What has to end before this action can begin, and has not."""
        partition, micro_batch = action.partition, action.micro_batch
        if action.kind is Kind.FORWARD:
            return "" if forwards[partition - 1] > micro_batch else f"F{partition - 1}.{micro_batch}"
        if action.kind is Kind.WEIGHT_GRAD:
            return "" if gradients[partition] > micro_batch else f"I{partition}.{micro_batch}"
        if forwards[partition] <= micro_batch:
            return f"F{partition}.{micro_batch}"
        following = "I" if (partition + 1, micro_batch) in split else "B"
        return "" if gradients[partition + 1] > micro_batch else f"{following}{partition + 1}.{micro_batch}"

    split = {
        (action.partition, action.micro_batch)
        for actions in order
        for action in actions
        if action.kind is Kind.INPUT_GRAD
    }
    owners = {action.partition: worker for worker, actions in enumerate(order) for action in actions}
    # Runs the order without times. What an action waits for never becomes undone, so it does not matter which worker
    # is tried first. A worker that cannot advance is tried again when a neighbor has; those left at the end wait in a
    # circle.
    position, due = [0] * len(order), deque(range(len(order)))
    while due:
        worker = due.popleft()
        actions = order[worker]
        advanced: set[int] = set()
        while position[worker] < len(actions) and not missing(action := actions[position[worker]]):
            if action.kind is Kind.FORWARD:
                forwards[action.partition] += 1
                advanced.add(action.partition + 1)
            elif action.kind is not Kind.WEIGHT_GRAD:
                gradients[action.partition] += 1
                advanced.add(action.partition - 1)
            position[worker] += 1
        due.extend({owners[partition] for partition in advanced if partition in owners} - {worker})
    waiting = [worker for worker, actions in enumerate(order) if position[worker] < len(actions)]
    named = [
        f"worker {worker} needs {missing(action)} for {action}"
        for worker in waiting[:MAX_NAMED_WORKERS]
        for action in [order[worker][position[worker]]]
    ]
    others = [f"and {len(waiting) - MAX_NAMED_WORKERS} others"] if len(waiting) > MAX_NAMED_WORKERS else []
    return f"the workers wait for each other: {'; '.join([*named, *others])}" if waiting else ""
