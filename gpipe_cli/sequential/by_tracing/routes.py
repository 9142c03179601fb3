"""How the values of a graph travel between its layers.

A value goes to the next layer that uses it, and from there to the one after: as part of the output if that is the
following layer, otherwise as a skip, straight past the layers in between. Backward thus adds up the gradients of a
value's uses in the same order as without a pipeline. Values that no later layer uses are not carried.

A size of the input is read from a tensor that has it. Only where no such tensor arrives does it travel on its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

from torch import fx

from gpipe_cli.sequential.by_tracing.cuts import Dataflow


@final
@dataclass(slots=True)
class Segment:
    """The steps of a graph between two cuts, and the values that enter and leave it."""

    flow: Dataflow
    steps: list[fx.Node]
    is_first: bool
    is_last: bool
    """Whether it returns the model's output. In one of the modes an earlier segment may already have computed it."""
    entering: list[fx.Node] = field(default_factory=list)
    leaving: list[fx.Node] = field(default_factory=list)
    popped: dict[str, fx.Node] = field(default_factory=dict)
    stashed: dict[str, fx.Node] = field(default_factory=dict)

    @property
    def skip_names(self) -> tuple[list[str], list[str]]:
        return list(self.popped), list(self.stashed)

    @property
    def arriving(self) -> list[fx.Node]:
        return [*self.entering, *self.popped.values()]


def segments_of(flow: Dataflow, positions: Sequence[int], *, use_skips: bool) -> list[Segment]:
    """Divide a graph at the given positions; without skips every value passes through all layers on its way."""
    bounds = [0, *positions, len(flow.steps)]
    last = len(bounds) - 2
    segments = [
        Segment(flow, flow.steps[start:stop], is_first=index == 0, is_last=index == last)
        for index, (start, stop) in enumerate(pairwise(bounds))
    ]
    segments[0].entering = list(flow.inputs)
    router = _Router(flow, segments, bounds)
    nodes = [node for node in (*flow.inputs, *flow.steps) if not flow.values[node].size]
    for node in sorted(nodes, key=lambda node: not flow.values[node].requires_grad):
        router.send(node, use_skips=use_skips)
    for node in flow.steps:
        if flow.values[node].size:
            router.send_size(node)
    return segments


@final
class _Router:
    def __init__(self, flow: Dataflow, segments: list[Segment], bounds: Sequence[int]) -> None:
        self._flow = flow
        self._segments = segments
        self._bounds = bounds

    def send(self, node: fx.Node, *, use_skips: bool) -> None:
        for source, target in pairwise([self._segment(node), *self._users(node)]):
            # The first activation to arrive makes sure that every layer has an input.
            is_only = any(not self._segments[index].leaving for index in range(source, target))
            if target == source + 1 or is_only or not use_skips:
                self._pass(node, source, target)
                continue
            name = f"{node.name} for layer {target}"
            self._segments[source].stashed[name] = node
            self._segments[target].popped[name] = node

    def send_size(self, node: fx.Node) -> None:
        size = self._flow.values[node].size
        assert size is not None, "only sizes are sent this way"
        holder = self._segment(node)
        for target in self._users(node):
            arriving = self._segments[target].arriving
            if not any(size in (self._flow.values[other].dimensions or ()) for other in arriving):
                self._pass(node, holder, target)
                holder = target

    def _pass(self, node: fx.Node, source: int, target: int) -> None:
        for index in range(source, target):
            if node not in self._segments[index].leaving:
                self._segments[index].leaving.append(node)
                self._segments[index + 1].entering.append(node)

    def _segment(self, node: fx.Node) -> int:
        """The segment that makes a value, or returns it."""
        position = self._flow.index[node]
        return min(max(0, bisect_right(self._bounds, position) - 1), len(self._segments) - 1)

    def _users(self, node: fx.Node) -> list[int]:
        own = self._segment(node)
        return sorted({self._segment(user) for user in node.users} - {own})
