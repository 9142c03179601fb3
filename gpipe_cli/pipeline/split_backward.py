"""The backward of a partition in two halves: first the gradients of its input, later those of its weights.

Decides where to cut. A node on the way from the output to the input whose other edges lead to parameters
works twice: in the first half for the input, in the second, from the gradient it was given then, for its
parameters. Knows nothing of partitions or schedules.

A hook on a tensor between layers fires in both halves: one that changes gradients changes weights' twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gpipe_cli.pipeline.boundary import ANCHOR, Mailbox
from gpipe_cli.torch_internals.engine import run_backward
from gpipe_cli.torch_internals.graph_progress import Node

__all__ = ["SplitBackward"]


@final
@dataclass(frozen=True, slots=True)
class _Branch:
    """A node that leads to the input as well as, by other edges, to parameters."""

    node: Node
    parameters: tuple[Tensor, ...]


@final
class SplitBackward:
    def __init__(self, roots: Sequence[tuple[GradientEdge, Tensor]], mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        leads = _leads_to_input([root.node for root, _ in roots], mailbox)
        self._ahead = [(root, gradient) for root, gradient in roots if leads[root.node]]
        self._aside = [(root, gradient) for root, gradient in roots if not leads[root.node]]
        self._branches = [_Branch(node, _parameters(node, leads)) for node, ahead in leads.items() if ahead]
        self._branches = [branch for branch in self._branches if branch.parameters]
        self._given: dict[Node, tuple[Tensor | None, ...]] = {}

    @property
    def possible(self) -> bool:
        """Whether each parameter hangs on one branch only: one used twice would be counted too often.

        What torch.compile made frees its tensors in its first backward, so it cannot work twice.
        """
        if any(type(branch.node).__name__ == "CompiledFunctionBackward" for branch in self._branches):
            return False
        used = [id(parameter) for branch in self._branches for parameter in branch.parameters]
        return len(set(used)) == len(used) and not (self._aside and self._ahead)

    def run_input_half(self) -> None:
        """Fill the mailbox, and remember what each branch was given."""
        if not self._ahead:
            return
        handles = [branch.node.register_prehook(self._remember(branch.node)) for branch in self._branches]
        try:
            with self._mailbox:
                _run(self._ahead, keep_graph=True, inputs=(ANCHOR,))
        finally:
            for handle in handles:
                handle.remove()

    def run_weight_half(self, *, keep_graph: bool) -> None:
        """Add the gradients of all parameters to theirs."""
        for branch in self._branches:
            edges = [
                (GradientEdge(branch.node, place), gradient)
                for place, gradient in enumerate(self._given.pop(branch.node, ()))
                if gradient is not None
            ]
            _run(edges, keep_graph=keep_graph, inputs=branch.parameters)
        _run(self._aside, keep_graph=keep_graph)

    def _remember(self, node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
        def remember(gradients: tuple[Tensor | None, ...]) -> None:
            self._given[node] = gradients

        return remember


def _run(
    pairs: Sequence[tuple[GradientEdge, Tensor]], *, keep_graph: bool, inputs: Sequence[Tensor] = ()
) -> None:
    if pairs:
        roots, gradients = zip(*pairs, strict=True)
        run_backward(roots, gradients, keep_graph=keep_graph, inputs=inputs)


def _leads_to_input(nodes: Sequence[Node], mailbox: Mailbox) -> dict[Node, bool]:
    """All nodes behind `nodes`, and whether each leads to what entered the partition."""
    leads: dict[Node, bool] = {}
    stack: list[tuple[Node, bool]] = [(node, False) for node in nodes]
    while stack:
        node, following_known = stack.pop()
        following = [other for other, _ in node.next_functions if other is not None]
        if following_known:
            own_entry = getattr(node, "mailbox", None) is mailbox
            leads[node] = own_entry or any(leads[other] for other in following)
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((other, False) for other in following if other not in leads)
    return leads


def _parameters(node: Node, leads: dict[Node, bool]) -> tuple[Tensor, ...]:
    """Those that `node` leads to by edges that do not lead to the input."""
    found: dict[Node, Tensor] = {}
    seen: set[Node] = set()
    stack = [other for other, _ in node.next_functions if other is not None and not leads[other]]
    while stack:
        other = stack.pop()
        if other in seen:
            continue
        seen.add(other)
        variable = getattr(other, "variable", None)
        if variable is not None and variable is not ANCHOR:
            found[other] = variable
        stack.extend(behind for behind, _ in other.next_functions if behind is not None)
    return tuple(found.values())
