"""What enters and leaves each layer of a model that was cut, and the graph of each layer.

A value goes to the next layer that uses it, and from there to the one after: as part of the output if that is the
following layer, otherwise as a skip, straight past the layers in between. Backward thus adds up the gradients of a
value's uses in the same order as without a pipeline. Values that no later layer uses are not carried.

A single tensor crosses between layers as it is, several as a tuple. A size of the input is read from a tensor that has
it. Only where no such tensor arrives does it cross, as an empty tensor of that shape, because pipelines carry tensors.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, fx

from gpipe_cli.sequential.tracing.cuts import Dataflow
from gpipe_cli.sequential.tracing.graph import device_of_input


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


def segment_graph(segment: Segment, input_paths: Sequence[tuple[Any, ...]], returns_tensor: bool) -> fx.Graph:
    """Return a graph whose arguments are the layer's input and the skips that it pops.

    input_paths: for each input of the model the keys that lead to it.
    returns_tensor: whether the model returns a bare tensor; otherwise the last layer returns a tuple.
    """
    graph = fx.Graph()
    copies = _enter(graph, segment, input_paths)
    device: list[fx.Node] = []

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert node.op == "get_attr", f"{node} was made in another layer and did not cross"
            copies[node] = graph.node_copy(node)
        return copies[node]

    for step in segment.steps:
        if step.target is device_of_input:
            if not device:
                tensor = next(node for node in segment.arriving if segment.flow.values[node].is_tensor)
                device.append(graph.call_function(getattr, (copies[tensor], "device")))
            copies[step] = device[0]
        else:
            copies[step] = graph.node_copy(step, copy_of)
    output: Any = fx.map_arg(segment.flow.output.args[0], copy_of) if segment.is_last else None
    if output is None:
        leaving = [_leave(graph, copy_of(node), segment, node) for node in segment.leaving]
        output = leaving[0] if len(leaving) == 1 else tuple(leaving)
    elif returns_tensor:
        (output,) = output
    stashed = tuple(copy_of(node) for node in segment.stashed.values())
    graph.output((output, stashed) if stashed else output)
    for node in graph.nodes:
        node.meta.clear()
    return graph


def _enter(
    graph: fx.Graph, segment: Segment, input_paths: Sequence[tuple[Any, ...]]
) -> dict[fx.Node, fx.Node]:
    """Take the layer's input apart; return what each value that arrives is in this graph."""
    values = segment.flow.values
    input = graph.placeholder("input")
    skips = [graph.placeholder(f"skip_{index}") for index in range(len(segment.popped))]
    copies = dict(zip(segment.popped.values(), skips, strict=True))
    is_tuple = len(segment.entering) > 1
    for index, node in enumerate(segment.entering):
        path = input_paths[index] if segment.is_first else (index,) if is_tuple else ()
        value = input
        for key in path:
            value = graph.call_function(operator.getitem, (value, key))
        if values[node].size is not None:
            value = graph.call_method("size", (value, 0))
        copies[node] = value
    own = set(segment.steps)
    for node in segment.flow.steps:
        size = values[node].size
        if size is None or node in own or node in copies:
            continue
        for tensor in segment.arriving:
            dimension = (values[tensor].dimensions or {}).get(size)
            if dimension is not None:
                copies[node] = graph.call_method("size", (copies[tensor], dimension))
                break
    return copies


def _leave(graph: fx.Graph, copy: fx.Node, segment: Segment, node: fx.Node) -> fx.Node:
    if segment.flow.values[node].size is None:
        return copy
    return graph.call_function(size_to_tensor, (copy,))


def size_to_tensor(size: int) -> Tensor:
    """Called by generated code. The shape carries the number; a dimension of 0 makes sure that it takes no memory."""
    return torch.empty(size, 0)
