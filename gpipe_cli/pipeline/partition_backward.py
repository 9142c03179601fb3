"""The two special ways to run a partition's backward: in two halves, and with its gradients collected.

A split backward computes the gradients of the partition's input first and those of its weights later. A node on the way
from the output to the input whose other edges lead to parameters runs twice: in the first half for the input, in the
second half, from the gradient it received then, for its parameters. A hook on a tensor between layers therefore fires
in both halves.

A collected backward hands the gradients of some leaves to its caller instead of adding them to `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_cli.pipeline.boundary import ANCHOR, GradSink
from gpipe_cli.torch_internals.autograd_engine import capture_gradients, run_backward
from gpipe_cli.torch_internals.autograd_graph import Node, nodes_behind, without_hooks


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
        self._received: dict[Node, tuple[Tensor | None, ...]] = {}

    @property
    def possible(self) -> bool:
        """Whether each parameter belongs to one branch only: the gradient of one in two branches would count twice.

        The node of a compiled layer frees its tensors in its first backward, so it cannot run twice.
        """
        if any(type(branch.node).__name__ == "CompiledFunctionBackward" for branch in self._branches):
            return False
        used = [id(parameter) for branch in self._branches for parameter in branch.parameters]
        return len(set(used)) == len(used) and not (self._aside and self._ahead)

    def run_input_half(self) -> None:
        """Fill the sink, and keep the gradient that each branch received."""
        if not self._ahead:
            return
        handles = [
            branch.node.register_prehook(self._keep_gradient(branch.node)) for branch in self._branches
        ]
        try:
            with self._sink:
                # Asking for the anchor makes the engine run only nodes that lead to the input.
                _run(self._ahead, keep_graph=True, inputs=(ANCHOR,))
        finally:
            for handle in handles:
                handle.remove()

    def run_weight_half(self, *, keep_graph: bool) -> None:
        """Add the gradients of all parameters to `.grad`."""
        for branch in self._branches:
            edges = [
                (GradientEdge(branch.node, place), gradient)
                for place, gradient in enumerate(self._received.pop(branch.node, ()))
                if gradient is not None
            ]
            _run(edges, keep_graph=keep_graph, inputs=branch.parameters)
        _run(self._aside, keep_graph=keep_graph)

    def _keep_gradient(self, node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            self._received[node] = gradients

        return keep


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


@final
@dataclass(slots=True)
class GradientCollector:
    """Collects the gradients that a backward hands to its caller instead of adding them to `.grad`."""

    leaves: dict[int, Tensor]
    """By id: their gradients are collected."""
    accumulated: Collection[int] | None
    """The ids of the other leaves whose gradients are added to `.grad`; None for all of them."""
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def run(self, roots: Sequence[Any], gradients: Sequence[Tensor], *, keep_graph: bool) -> None:
        """Run the backward of one micro-batch."""
        leaves = []
        if self.leaves or self.accumulated is None or self.accumulated:
            leaves = [leaf for leaf in leaves_behind([root.node for root in roots]) if self._wants(leaf)]
        # The caller's own backward runs the hooks, with the collected gradients.
        with without_hooks(leaves):
            captured = capture_gradients(roots, gradients, keep_graph=keep_graph, inputs=(ANCHOR, *leaves))
        for leaf, gradient in zip(leaves, captured[1:], strict=True):
            if gradient is None:
                continue
            if id(leaf) not in self.leaves:
                run_backward([get_gradient_edge(leaf)], [gradient], keep_graph=False)
            elif id(leaf) in self.gradients:
                self.gradients[id(leaf)] = self.gradients[id(leaf)] + gradient
            else:
                self.gradients[id(leaf)] = gradient

    def take(self, leaf: Tensor) -> Tensor | None:
        return self.gradients.pop(id(leaf), None)

    def _wants(self, leaf: Tensor) -> bool:
        if leaf is ANCHOR:
            return False
        return self.accumulated is None or id(leaf) in self.leaves or id(leaf) in self.accumulated


def leaves_behind(nodes: Sequence[Node]) -> list[Tensor]:
    """The leaves of the graph that begins with `nodes`."""
    leaves = (getattr(node, "variable", None) for node in nodes_behind(nodes))
    return [leaf for leaf in leaves if leaf is not None]
