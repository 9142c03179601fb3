"""How many micro-batches an order keeps alive on each partition, and in which form.

One worker runs a partition's actions in one order, so this does not depend on how long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from gpipe_cli.schedule.action import Action, Kind, Order


class Live(NamedTuple):
    """The micro-batches alive at one moment."""

    graphs: int
    """Those with everything their backward needs."""
    inputs: int
    """Checkpointed ones, whose input is kept until their backward has ended."""


@final
@dataclass(frozen=True)
class PartitionPeaks:
    """What one partition keeps at the moments that can be the worst."""

    moments: tuple[Live, ...]
    """None exceeds another in both numbers; which of them is the worst depends on the bytes."""

    def bytes(self, graph: int, input: int) -> int:
        """At the worst moment, if one graph and one input have that many bytes."""
        return max(moment.graphs * graph + moment.inputs * input for moment in self.moments)


def partition_peaks(order: Order, checkpoint_stops: Sequence[int] = ()) -> list[PartitionPeaks]:
    """For each partition; micro-batches below its stop are checkpointed, without stops none is."""
    by_partition: dict[int, list[Action]] = {}
    for actions in order:
        for action in actions:
            by_partition.setdefault(action.partition, []).append(action)
    stops = checkpoint_stops or [0] * len(by_partition)
    return [_peaks(actions, stops[partition]) for partition, actions in sorted(by_partition.items())]


def _peaks(actions: Iterable[Action], checkpoint_stop: int) -> PartitionPeaks:
    graphs = inputs = 0
    moments = set()
    for action in actions:
        kind, is_checkpointed = action.kind, action.micro_batch < checkpoint_stop
        if kind is Kind.FORWARD:
            if is_checkpointed:
                inputs += 1
            else:
                graphs += 1
        elif kind is not Kind.WEIGHT_GRAD and is_checkpointed:
            graphs += 1  # recomputed
        moments.add((graphs, inputs))
        if kind is Kind.BACKWARD or kind is Kind.WEIGHT_GRAD:
            graphs -= 1
            inputs -= is_checkpointed
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
