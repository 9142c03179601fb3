"""Makes split backwards whole again where that shortens the step.

The two halves of a backward take longer than the whole one, on some devices much longer. Only the backwards at the end
of a step gain much from being split, because earlier partitions wait for their input gradients and nothing else is left
to do. So each partition splits the backwards of its last micro-batches, of as many as shorten the step most.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_cli.schedule.action import Action, Kind, Order
from gpipe_cli.schedule.search_problem import SearchProblem

ROUNDS = 2
MOST_ACTIONS = 400_000
"""Simulated actions in one call: about a second."""
_TIED = 1 + 1e-9


def with_whole_backwards(problem: SearchProblem, order: Order) -> Order:
    """The order with as many whole backwards as do not lengthen the step; as it is if halves cost nothing."""
    partitions = [partition for partition in range(problem.partitions) if _can_gain(problem, partition)]
    whole = [0] * problem.partitions
    best = problem.step_of(order)
    trials = MOST_ACTIONS // max(1, sum(map(len, order)))
    for _ in range(ROUNDS):
        before = list(whole)
        # A later partition's gradients are what the earlier ones wait for.
        for partition in reversed(partitions):
            for number in _numbers(problem.chunks):
                if number == whole[partition] or trials <= 0:
                    continue
                trials -= 1
                trial = [*whole[:partition], number, *whole[partition + 1 :]]
                step = problem.step_of(joined(order, trial))
                if step < best / _TIED or (step <= best * _TIED and number > whole[partition]):
                    best, whole = min(step, best), trial
        if whole == before:
            break
    return joined(order, whole)


def joined(order: Order, whole: Sequence[int]) -> Order:
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


def _can_gain(problem: SearchProblem, partition: int) -> bool:
    cost = problem.costs[partition]
    input_grad, weight_grad = cost.split
    # Without an input gradient to compute, the weight gradient is the whole backward, and an action is saved.
    return cost.backward < (input_grad + weight_grad) / _TIED or input_grad == 0.0


def _numbers(chunks: int) -> list[int]:
    """How many backwards may be whole, most first: all, all but 1, 2, 4, ..., none."""
    powers = [2**power for power in range(chunks.bit_length())]
    return sorted({chunks, *(chunks - power for power in powers if power <= chunks), 0}, reverse=True)
