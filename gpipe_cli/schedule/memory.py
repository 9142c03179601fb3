"""How many micro-batches an order keeps alive on each partition, and in which form.

A partition's actions are run by one worker in one order, so this does not depend on how long anything takes.
Knows nothing of how many bytes a micro-batch has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from gpipe_cli.schedule.action import Action, Kind, Order


class Alive(NamedTuple):
    """What is there at one moment."""

    graphs: int
    """Micro-batches with all that their backward needs."""
    inputs: int
    """Checkpointed ones: their input is kept, until their backward has ended."""


@final
@dataclass(frozen=True)
class Kept:
    """What one partition keeps, at the moments that can be the worst."""

    moments: tuple[Alive, ...]
    """None of them is exceeded by another in both numbers; which is worst depends on the bytes."""

    def bytes(self, graph: int, input: int) -> int:
        """At the worst moment, if that many bytes belong to one graph and to one input."""
        return max(moment.graphs * graph + moment.inputs * input for moment in self.moments)


def kept_at_once(order: Order, checkpoint_stops: Sequence[int] = ()) -> list[Kept]:
    """For each partition; micro-batches below its stop keep their input and are recomputed, without stops none."""
    by_partition: dict[int, list[Action]] = {}
    for actions in order:
        for action in actions:
            by_partition.setdefault(action.partition, []).append(action)
    stops = checkpoint_stops or [0] * len(by_partition)
    return [_kept(actions, stops[partition]) for partition, actions in sorted(by_partition.items())]


def _kept(actions: Iterable[Action], checkpoint_stop: int) -> Kept:
    graphs = inputs = 0
    seen = set()
    for action in actions:
        kind, is_checkpointed = action.kind, action.micro_batch < checkpoint_stop
        if kind is Kind.FORWARD:
            if is_checkpointed:
                inputs += 1
            else:
                graphs += 1
        elif kind is not Kind.WEIGHT_GRAD and is_checkpointed:
            graphs += 1  # recomputed
        seen.add((graphs, inputs))
        if kind is Kind.BACKWARD or kind is Kind.WEIGHT_GRAD:
            graphs -= 1
            inputs -= is_checkpointed
    return Kept(_worst([Alive(*one) for one in seen]))


def _worst(moments: Sequence[Alive]) -> tuple[Alive, ...]:
    """Those that no other exceeds in both numbers."""
    front: list[Alive] = []
    for moment in sorted(moments, reverse=True):
        if not front or moment.inputs > front[-1].inputs:
            front.append(moment)
    return tuple(front)
