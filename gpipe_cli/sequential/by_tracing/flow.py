"""One graph as steps in order, and what crosses between any two of them.

A border is the number of steps before it. Parameters and buffers do not flow: a layer that uses them holds
them. Decides which borders bar themselves, by what crosses and by memory that is written later.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import final

from torch import fx

from gpipe_cli.sequential.by_tracing.values import Fact, Span, Values

__all__ = ["Flow", "reads", "reads_training"]

_NO_STEPS = ("placeholder", "get_attr", "output")


@final
class Flow:
    def __init__(self, graph: fx.Graph, values: Values, output_names: tuple[str, ...] | None) -> None:
        self.output_names = output_names
        """The keys of the dict that the graph returns, if it does."""
        self.steps = [node for node in graph.nodes if node.op not in _NO_STEPS]
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.output = next(node for node in graph.nodes if node.op == "output")
        self.facts = values.facts
        self._index = {node: index for index, node in enumerate(self.steps)} | dict.fromkeys(self.inputs, -1)
        self._index[self.output] = len(self.steps)
        self.crossing = self._crossing()
        """For each border the values made before it and used after it, those that are tensors first."""
        self._barred = set(self._spanned(values.spans))
        self._held = [0, *accumulate(any(True for _ in self.held(step)) for step in self.steps)]

    def tensors(self, border: int) -> int:
        return sum(self.facts[node].is_tensor for node in self.crossing[border])

    def bytes(self, border: int) -> int:
        return sum(self.facts[node].bytes for node in self.crossing[border])

    def obstacle(self, border: int) -> str | None:
        """Why there can be no cut at a border; None where there can."""
        if border in self._barred:
            return "memory that crosses is written later"
        for node in self.crossing[border]:
            if not _can_cross(self.facts[node]):
                return f"a {self.facts[node].kind.__name__} of {_maker(node)} crosses"
        return None if self.tensors(border) else "no tensor crosses"

    def holders(self, border: int) -> int:
        """How many steps before a border call a module or read a parameter or buffer."""
        return self._held[border]

    def held(self, step: fx.Node) -> Iterator[str]:
        """The dotted paths of the modules and tensors a step uses."""
        if step.op == "call_module":
            yield str(step.target)
        yield from (path for path in reads(step) if not reads_training(path))

    def _crossing(self) -> list[list[fx.Node]]:
        crossing: list[list[fx.Node]] = [[] for _ in range(len(self.steps) + 1)]
        for node in (*self.inputs, *self.steps):
            uses = [self._index[user] for user in node.users]
            for border in range(self._index[node] + 1, max(uses, default=-1) + 1):
                crossing[border].append(node)
        return [sorted(nodes, key=lambda node: not self.facts[node].is_tensor) for nodes in crossing]

    def _spanned(self, spans: list[Span]) -> Iterator[int]:
        for span in spans:
            yield from range(self._index[span.first] + 1, self._index[span.last] + 1)


def reads(step: fx.Node) -> Iterator[str]:
    """The dotted paths of what a step takes from the model besides the module it calls."""
    yield from (str(node.target) for node in step.all_input_nodes if node.op == "get_attr")


def reads_training(path: str) -> bool:
    return path.rpartition(".")[2] == "training"


def _can_cross(fact: Fact) -> bool:
    return fact.is_tensor or fact.is_size


def _maker(node: fx.Node) -> str:
    """The module that a value comes from, for people; what functions did to it since is left out."""
    while node.op != "call_module" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return f"'{node.target}'"
