"""A layer: the code of a stretch of a model's graph, and the parts of the model it uses.

Decides the form in which values cross between layers: a bare tensor where there is one, else a tuple. A
size crosses as a tensor of that shape without elements. Knows nothing of where the cuts are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, fx, nn

from gpipe_cli.sequential.by_tracing.flow import Flow
from gpipe_cli.sequential.by_tracing.outputs import carried

__all__ = ["Stretch", "TracedLayer", "stretch_graph"]

Code: TypeAlias = Callable[[nn.Module, Any], Any]
"""A layer's forward in one mode."""


@final
class TracedLayer(nn.Module):
    """Holds parts of the model at their original paths; its code comes from the model's graph."""

    def __init__(self) -> None:
        super().__init__()
        self._graphs: dict[bool, fx.Graph] = {}
        self._code: dict[bool, Code] = {}

    def set_graphs(self, training: fx.Graph, evaluation: fx.Graph) -> None:
        """What to do in each mode, once the layer holds all that the graphs use."""
        self._graphs = {True: training, False: evaluation}
        code = {graph: _compiled(graph, self) for graph in {training, evaluation}}
        self._code = {mode: code[graph] for mode, graph in self._graphs.items()}

    def forward(self, input: Any) -> Any:
        return self._code[self.training](self, input)

    # Generated code cannot be pickled; what it was generated from can.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_code"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.set_graphs(self._graphs[True], self._graphs[False])


@final
@dataclass(frozen=True, slots=True)
class Stretch:
    """The steps of a flow between two borders."""

    flow: Flow
    start: int
    stop: int
    is_last: bool
    """Whether the model's output leaves it. In one of the modes a stretch before it may have reached it."""

    @property
    def steps(self) -> list[fx.Node]:
        return self.flow.steps[self.start : self.stop]


def stretch_graph(stretch: Stretch, is_tuple: bool) -> fx.Graph:
    """A graph of one argument; `is_tuple` says whether the model's own input is a tuple."""
    flow, graph = stretch.flow, fx.Graph()
    value = graph.placeholder("input")
    first = stretch.start == 0
    entering = flow.inputs if first else flow.crossing[stretch.start]
    made = _unpacked(graph, value, entering, flow, is_tuple if first else len(entering) > 1)

    def copied(node: fx.Node) -> fx.Node:
        if node not in made:
            assert node.op == "get_attr", f"{node} was made in another layer and did not cross"
            made[node] = graph.node_copy(node)
        return made[node]

    for step in stretch.steps:
        made[step] = graph.node_copy(step, copied)
    if stretch.is_last:
        output = fx.map_arg(flow.output.args[0], copied)
        graph.output(output if flow.output_names is None else carried(graph, output))
    else:
        leaving = [_packed(graph, made[node], node, flow) for node in flow.crossing[stretch.stop]]
        graph.output(leaving[0] if len(leaving) == 1 else tuple(leaving))
    for node in graph.nodes:
        node.meta.clear()  # what tracing noted, with classes of the model that may not be picklable
    return graph


def _compiled(graph: fx.Graph, layer: nn.Module) -> Code:
    """The graph as a function of a layer and a value."""
    code: Code = type(fx.GraphModule(layer, graph)).forward
    return code


def _unpacked(
    graph: fx.Graph, value: fx.Node, entering: Sequence[fx.Node], flow: Flow, is_tuple: bool
) -> dict[fx.Node, fx.Node]:
    made: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(entering):
        part = graph.call_function(operator.getitem, (value, index)) if is_tuple else value
        if flow.facts[node].is_size:
            part = graph.call_function(size_carried, (part,))
            if flow.facts[node].kind is int:
                part = graph.call_function(operator.getitem, (part, 0))
        made[node] = part
    return made


def _packed(graph: fx.Graph, made: fx.Node, node: fx.Node, flow: Flow) -> fx.Node:
    if not flow.facts[node].is_size:
        return made
    size: Any = (made,) if flow.facts[node].kind is int else made
    return graph.call_function(carrier_of, (size,))


def carrier_of(size: tuple[int, ...]) -> Tensor:
    """A tensor without elements whose shape tells the size."""
    return torch.empty((*size, 0))


def size_carried(carrier: Tensor) -> torch.Size:
    return carrier.shape[:-1]
