"""Where to cut a model: the data that flows between the steps of a graph, the possible cuts, and the chosen ones.

A position in a graph is the number of steps before it. Parameters and buffers do not flow: a layer that uses them
holds them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import final

from torch import fx, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.tracing.graph import TraceGraph, info_of

_LONG = 24  # uses of modules: two residual blocks of the larger kind
_QUARTERS = 4  # in a small model, a segment of more than a quarter of it is long
_NEAR = 12  # uses of modules on either side in which no point may have fewer activations than a cut


@final
class Dataflow:
    """A graph as steps in order, with the values that cross each position between them."""

    def __init__(self, trace: TraceGraph) -> None:
        self.trace = trace
        self.steps, self.inputs, self.output = trace.steps, trace.inputs, trace.output
        self.values = {node: info_of(node) for node in (*self.inputs, *self.steps)}
        self.index = {node: index for index, node in enumerate(self.steps)} | dict.fromkeys(self.inputs, -1)
        self.index[self.output] = len(self.steps)
        self.crossing: list[list[fx.Node]] = [[] for _ in range(len(self.steps) + 1)]
        """For each position the values that are made before it and used after it."""
        for node in (*self.inputs, *self.steps):
            last_use = max((self.index[user] for user in node.users), default=-1)
            # Quadratic only where many values are used until the end; most are used by the next few steps.
            for position in range(self.index[node] + 1, last_use + 1):
                self.crossing[position].append(node)
        self._inside_write = self._positions_inside_writes()
        self._uses = [0, *accumulate(any(True for _ in used_paths(step)) for step in self.steps)]

    def _positions_inside_writes(self) -> set[int]:
        calls = [self.values[step].call for step in self.steps]
        inside: set[int] = set()
        for span in self.trace.spans:
            first = 0 if span.first < 0 else bisect_left(calls, span.first)
            inside.update(range(first + 1, bisect_right(calls, span.last)))
        return inside

    def activations(self, position: int) -> int:
        """How many tensors with gradients cross; masks and positions are the same at every cut."""
        return sum(self.values[node].requires_grad for node in self.crossing[position])

    def bytes(self, position: int) -> int:
        return sum(self.values[node].bytes for node in self.crossing[position])

    def uses(self, position: int) -> int:
        """How many steps before a position call a module or read a parameter or buffer."""
        return self._uses[position]

    def obstacle(self, position: int) -> str | None:
        """Return why the graph cannot be cut at a position, or None if it can."""
        if position in self._inside_write:
            return "memory that crosses the cut is written after it"
        for node in self.crossing[position]:
            value = self.values[node]
            if not (value.is_tensor or value.size):
                return f"a {value.kind.__name__} of {_source_module(node)} crosses"
        has_tensor = any(self.values[node].is_tensor for node in self.crossing[position])
        return None if has_tensor else "no tensor crosses"


def used_paths(step: fx.Node) -> Iterator[str]:
    """Yield the dotted paths of the modules and tensors that a step uses."""
    if step.op == "call_module":
        yield str(step.target)
    yield from (path for path in attribute_paths(step) if path.rpartition(".")[2] != "training")


def attribute_paths(step: fx.Node) -> Iterator[str]:
    """Yield the dotted paths of what a step reads from the model besides the module it calls."""
    yield from (str(node.target) for node in step.all_input_nodes if node.op == "get_attr")


def _source_module(node: fx.Node) -> str:
    """The module that a value comes from, for messages; functions applied to it since are left out."""
    while node.op != "call_module" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return f"'{node.target}'"


@final
@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place where a model could be cut in both modes at once.

    If training and evaluation share a graph, it has one position. If each has its own, it has a position in each,
    such that steps that the graphs have in common are on the same side of both.
    """

    positions: tuple[int, ...]
    obstacle: str | None
    """Why the model cannot be cut here; None if it can."""
    activations: int
    """How many tensors with gradients cross, in the mode in which fewer do."""
    bytes: int
    uses: int
    """Steps before it that use modules or tensors of the model."""


def cut_points(flows: Sequence[Dataflow], model: nn.Module) -> list[CutPoint]:
    """Return all cut points in order, without the two ends of the model."""
    candidates = _common_positions(flows)
    buffer_obstacles = _buffer_obstacles(flows, candidates, model) if candidates else {}
    points = []
    for index, positions in enumerate(candidates):
        pairs = list(zip(flows, positions, strict=True))
        obstacles = (flow.obstacle(position) for flow, position in pairs)
        point = CutPoint(
            positions,
            buffer_obstacles.get(index) or next(filter(None, obstacles), None),
            min(flow.activations(position) for flow, position in pairs),
            sum(flow.bytes(position) for flow, position in pairs),
            sum(flow.uses(position) for flow, position in pairs),
        )
        points.append(point)
    return points


def _common_positions(flows: Sequence[Dataflow]) -> list[tuple[int, ...]]:
    if len(flows) == 1:
        return [(position,) for position in range(1, len(flows[0].steps))]
    training, evaluation = ([_signature(flow, step) for step in flow.steps] for flow in flows)
    # autojunk would ignore steps that occur often, such as the same activation function after every layer.
    blocks = SequenceMatcher(None, training, evaluation, autojunk=False).get_matching_blocks()
    positions = {
        (block.a + offset, block.b + offset)
        for block in blocks
        if block.size
        for offset in range(block.size + 1)
    }
    return sorted(positions - {(0, 0), (len(training), len(evaluation))})


def _signature(flow: Dataflow, step: fx.Node) -> tuple[str, str, str]:
    """Identifies the same step in the graphs of both modes."""
    return step.op, str(step.target), flow.values[step].modules[-1]


def _buffer_obstacles(
    flows: Sequence[Dataflow], candidates: Sequence[tuple[int, ...]], model: nn.Module
) -> dict[int, str]:
    """Rule out cuts between two calls of a module with buffers: two layers would update the same buffers."""
    calls: dict[str, list[int]] = defaultdict(list)  # for each module the candidates before its calls
    for flow, positions in zip(flows, zip(*candidates, strict=True), strict=True):
        for index, step in enumerate(flow.steps):
            if step.op == "call_module":
                calls[str(step.target)].append(bisect_right(positions, index))
    obstacles: dict[int, str] = {}
    for path, indices in calls.items():
        first, last = min(indices), max(indices)
        if first < last and next(model.get_submodule(path).buffers(), None) is not None:
            reason = f"'{path}', which has buffers, is used on both sides"
            obstacles |= dict.fromkeys(range(first, last), reason)
    return obstacles


def choose_cuts(points: Sequence[CutPoint], total_uses: int) -> list[CutPoint]:
    """Choose cuts that are cheap and enough to balance any number of partitions.

    Cuts are where no more activations cross than nearby: in most models one between blocks, and in an encoder-decoder
    also the encoder's output. A long segment without such a point (a dense block, a U-Net's skips) is cut near its
    middle, where the fewest bytes cross, until no segment is long. Between two modules there is at most one cut.
    """
    inner = [point for point in points if 0 < point.uses < total_uses]
    legal = [point for point in inner if point.obstacle is None]
    if inner and not legal:
        obstacles = ", ".join(sorted({point.obstacle for point in inner if point.obstacle})[:3])
        raise ConfigError(
            f"the model cannot be cut anywhere: {obstacles}; pass only tensors and sizes between its modules, or list "
            "the layers in the order in which they run, in the form model.layers=[first,second]"
        )
    narrow = _narrowest(legal)
    # The last of the cheapest, so that a function stays with the module before it.
    cuts = [
        min(reversed([*group]), key=attrgetter("bytes")) for _, group in groupby(narrow, attrgetter("uses"))
    ]
    longest = min(_LONG, max(1, total_uses // _QUARTERS))
    for start, stop in pairwise([0, *(cut.uses for cut in cuts), total_uses]):
        cuts = [*cuts, *_bisect(start, stop, legal, longest)]
    return sorted(cuts, key=attrgetter("positions"))


def _narrowest(points: Sequence[CutPoint]) -> list[CutPoint]:
    """The points that fewest activations cross within their neighborhood."""
    uses = [point.uses for point in points]
    narrow = []
    for point in points:
        near = points[bisect_left(uses, point.uses - _NEAR) : bisect_right(uses, point.uses + _NEAR)]
        if point.activations == min(other.activations for other in near):
            narrow.append(point)
    return narrow


def _bisect(start: int, stop: int, legal: Sequence[CutPoint], longest: int) -> list[CutPoint]:
    """Cut the segment from `start` to `stop` uses until none of its parts is long."""
    length = stop - start
    # Only the middle half: a cut near an end would leave the rest about as long as before.
    central = [point for point in legal if length <= 4 * (point.uses - start) <= 3 * length]
    if length <= longest or not central:
        return []
    best = min(central, key=lambda point: (point.bytes, abs(2 * point.uses - start - stop)))
    halves = (start, best.uses), (best.uses, stop)
    return [best, *(cut for half in halves for cut in _bisect(*half, legal, longest))]
