"""A partition's backward in two halves: the gradients of the partition's input first, those of its weights later.

A node on the way from the output to the input whose other edges lead to parameters runs twice: in the first half for
the input, in the second half, from the gradient it received then, for its parameters. A graph with nodes that must not
run twice, or not in part, is not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gpipe_cli.pipeline.boundary import ANCHOR, GradSink
from gpipe_cli.torch_internals.autograd import (
    Node,
    capture_gradients,
    is_python_function,
    is_reentrant_checkpoint,
    output_edges,
    run_backward,
)


@final
@dataclass(frozen=True, slots=True)
class _Branch:
    """A node that leads to the input and, by other edges, to parameters."""

    node: Node
    parameters: tuple[Tensor, ...]


@final
class SplitBackward:
    def __init__(self, roots: Sequence[tuple[GradientEdge, Tensor]], sink: GradSink) -> None:
        self._sink = sink
        # One depth-first pass over the graph of the micro-batch, without recursion: models are deep.
        leads = _leads_to_input([root.node for root, _ in roots], sink)
        self._ahead = [(root, gradient) for root, gradient in roots if leads[root.node]]
        self._aside = [(root, gradient) for root, gradient in roots if not leads[root.node]]
        self._branches = [_Branch(node, _parameters(node, leads)) for node, ahead in leads.items() if ahead]
        self._branches = [branch for branch in self._branches if branch.parameters]
        self._received: dict[Node, list[tuple[GradientEdge, Tensor]]] = {}

        self._all_nodes = leads.keys()

    @property
    def possible(self) -> bool:
        """Whether the halves together do what one backward does.

        Each parameter must belong to one branch only: the gradient of one in two branches would count twice. What a
        Python function does when it runs twice is not known: a compiled layer frees its tensors, a nested pipe adds its
        gradients again. A reentrant checkpoint refuses to run a part of the graph.
        """
        if any(is_python_function(branch.node) for branch in self._branches) or any(
            map(is_reentrant_checkpoint, self._all_nodes)
        ):
            return False
        used = [id(parameter) for branch in self._branches for parameter in branch.parameters]
        return len(set(used)) == len(used) and not (self._aside and self._ahead)

    def run_input_half(self) -> None:
        """Fill the sink, and keep the gradient that each branch received."""
        if not self._ahead:
            return
        roots, gradients = zip(*self._ahead, strict=True)
        edges = [edge for branch in self._branches for edge in output_edges(branch.node)]
        with self._sink:
            # Asking for the anchor makes the engine run only nodes that lead to the input.
            _, *received = capture_gradients(roots, gradients, keep_graph=True, inputs=(ANCHOR, *edges))
        for edge, gradient in zip(edges, received, strict=True):
            if gradient is not None:
                self._received.setdefault(edge.node, []).append((edge, gradient))

    def run_weight_half(self, *, keep_graph: bool) -> None:
        """Add the gradients of all parameters to `.grad`."""
        for branch in self._branches:
            pairs = self._received.pop(branch.node, ())
            _run(pairs, keep_graph=keep_graph, inputs=branch.parameters)
        _run(self._aside, keep_graph=keep_graph)


def _run(
    pairs: Sequence[tuple[GradientEdge, Tensor]], *, keep_graph: bool, inputs: Sequence[Tensor] = ()
) -> None:
    if pairs:
        roots, gradients = zip(*pairs, strict=True)
        run_backward(roots, gradients, keep_graph=keep_graph, inputs=inputs)


def _leads_to_input(nodes: Sequence[Node], sink: GradSink) -> dict[Node, bool]:
    """All nodes behind `nodes`, and whether each leads to what entered the partition."""
    leads: dict[Node, bool] = {}
    stack: list[tuple[Node, bool]] = [(node, False) for node in nodes]
    while stack:
        node, following_known = stack.pop()
        following = [other for other, _ in node.next_functions if other is not None]
        if following_known:
            own_entry = getattr(node, "sink", None) is sink
            leads[node] = own_entry or any(leads[other] for other in following)
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((other, False) for other in following if other not in leads)
    return leads


def _parameters(node: Node, leads: dict[Node, bool]) -> tuple[Tensor, ...]:
    """The parameters that `node` leads to by edges that do not lead to the input."""
    parameters: dict[Node, Tensor] = {}
    visited: set[Node] = set()
    stack = [other for other, _ in node.next_functions if other is not None and not leads[other]]
    while stack:
        other = stack.pop()
        if other in visited:
            continue
        visited.add(other)
        variable = getattr(other, "variable", None)
        if variable is not None and variable is not ANCHOR:
            parameters[other] = variable
        stack.extend(behind for behind, _ in other.next_functions if behind is not None)
    return tuple(parameters.values())
