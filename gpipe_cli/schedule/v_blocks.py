"""V-Half and V-Min (arXiv 2405.15362): two partitions per device, there and back, with half and a third of the memory.

All actions of one micro-batch form a block, which repeats every period. Times are in units of one action: a period has
six, a forward, an input gradient and a weight gradient of each of the two partitions. The sooner the next device
continues (`hops`), the fewer micro-batches are alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from gpipe_cli.schedule.action import Action, Kind, Order

_PERIOD = 6
_HOPS = {"v_half": (2, 1, 2, 1), "v_min": (1, 1, 1, 1)}
"""From device to device: forward there, forward back, backward there, backward back."""

Block = list[list[tuple[int, Kind, int]]]
"""For each device the begin, kind and partition of the actions of the first micro-batch."""


def orders(chunks: int, devices: int) -> Iterator[tuple[str, Order]]:
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
    """Those in which no action of a device meets one of another micro-batch, thanks to waits at the two turns."""
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
