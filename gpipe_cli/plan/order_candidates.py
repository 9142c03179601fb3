"""Orders that a search starts from: existing schedules, orders of V-shaped placements, orders with whole backwards.

V-Half and V-Min (arXiv 2405.15362) have two partitions per device, there and back, with half and a third of the memory.
All actions of one micro-batch form a block, which repeats every period. Times are in units of one action: a period has
six, a forward, an input gradient and a weight gradient of each of the two partitions. The sooner the next device
continues (`hops`), the fewer micro-batches are alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from gpipe_cli.plan.order_problem import OrderProblem
from gpipe_cli.schedule import names, order, traits
from gpipe_cli.schedule.action import Action, Kind, Order
from gpipe_cli.schedule.orders import ZERO_BUBBLE_V, one_by_one, zero_bubble_v

JOINING_ROUNDS, JOINING_EFFORT = 2, 400_000
"""The rounds in which split backwards are made whole, and the actions simulated for it: about a second."""
_TOLERANCE = 1e-9
"""Relative: steps that differ by less are equal."""
_PERIOD = 6
_HOPS = {"v_half": (2, 1, 2, 1), "v_min": (1, 1, 1, 1)}
"""From device to device: forward there, forward back, backward there, backward back."""

Block = list[list[tuple[int, Kind, int]]]
"""For each device the begin, kind and partition of the actions of the first micro-batch."""


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


def with_whole_backwards(problem: OrderProblem, order: Order) -> Order:
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
                if number == whole[partition] or trials <= 0:
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
