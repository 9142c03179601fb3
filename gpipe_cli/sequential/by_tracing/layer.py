"""A traced layer: the code of a segment of a model's graph, and the form in which values enter and leave it.

A single tensor crosses between layers as it is, several as a tuple. A size crosses as an empty tensor of that shape,
because pipelines carry tensors only. A dict that the model returns leaves the last layer as a tuple of its values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, fx, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.by_tracing.cuts import Dataflow

Code: TypeAlias = Callable[[nn.Module, Any], Any]
"""A layer's forward in one mode."""

_OUTPUT_CURE = "a model must return a tensor, or a tuple or dict of tensors; wrap it in a module that does"


@final
class TracedLayer(nn.Module):
    """Holds parts of the model at their original paths; its code comes from the model's graph."""

    def __init__(self) -> None:
        super().__init__()
        self._graphs: dict[bool, fx.Graph] = {}
        self._code: dict[bool, Code] = {}

    def set_graphs(self, training: fx.Graph, evaluation: fx.Graph) -> None:
        """Set the code of each mode. The layer must already hold all that the graphs use."""
        self._graphs = {True: training, False: evaluation}
        # fx compiles a graph into the forward of a new GraphModule class; only that function is of use here.
        code: dict[fx.Graph, Code] = {
            graph: type(fx.GraphModule(self, graph)).forward for graph in {training, evaluation}
        }
        self._code = {mode: code[graph] for mode, graph in self._graphs.items()}

    def forward(self, input: Any) -> Any:
        return self._code[self.training](self, input)

    # Generated code cannot be pickled, but the graphs it is generated from can.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_code"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.set_graphs(self._graphs[True], self._graphs[False])


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """The steps of a graph between two cuts."""

    flow: Dataflow
    start: int
    stop: int
    is_last: bool
    """Whether it returns the model's output. In one of the modes an earlier segment may already have computed it."""

    @property
    def steps(self) -> list[fx.Node]:
        return self.flow.steps[self.start : self.stop]


def segment_graph(segment: Segment, takes_tuple: bool) -> fx.Graph:
    """Return a graph of one argument; `takes_tuple` says whether the model's own input is a tuple."""
    flow, graph = segment.flow, fx.Graph()
    is_first = segment.start == 0
    entering = flow.inputs if is_first else flow.crossing[segment.start]
    is_tuple = takes_tuple if is_first else len(entering) > 1
    input = graph.placeholder("input")
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(entering):
        value = graph.call_function(operator.getitem, (input, index)) if is_tuple else input
        if flow.values[node].is_size:
            value = graph.call_function(tensor_to_size, (value,))
            if flow.values[node].kind is int:
                value = graph.call_function(operator.getitem, (value, 0))
        copies[node] = value

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert node.op == "get_attr", f"{node} was made in another layer and did not cross"
            copies[node] = graph.node_copy(node)
        return copies[node]

    for step in segment.steps:
        copies[step] = graph.node_copy(step, copy_of)
    if segment.is_last:
        output: Any = fx.map_arg(flow.output.args[0], copy_of)
        if flow.output_names is not None:
            # The graph has the dict either as a literal or as the value of a node.
            is_literal = isinstance(output, dict)
            output = tuple(output.values()) if is_literal else graph.call_function(dict_values, (output,))
        graph.output(output)
    else:
        leaving = [_leaving(graph, copies[node], flow, node) for node in flow.crossing[segment.stop]]
        graph.output(leaving[0] if len(leaving) == 1 else tuple(leaving))
    for node in graph.nodes:
        node.meta.clear()  # tracing notes classes of the model there, which may not be picklable
    return graph


def _leaving(graph: fx.Graph, copy: fx.Node, flow: Dataflow, node: fx.Node) -> fx.Node:
    if not flow.values[node].is_size:
        return copy
    size: Any = (copy,) if flow.values[node].kind is int else copy
    return graph.call_function(size_to_tensor, (size,))


# Functions that generated code calls.


def size_to_tensor(size: tuple[int, ...]) -> Tensor:
    # The shape carries the numbers; the added dimension of 0 makes sure that no element takes memory.
    return torch.empty((*size, 0))


def tensor_to_size(tensor: Tensor) -> torch.Size:
    return tensor.shape[:-1]


def dict_values(output: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(output.values())


def output_names(model: nn.Module, output: Any) -> tuple[str, ...] | None:
    """Return the keys of a dict, or None for a tensor or a tuple; refuse an output that no pipeline can carry."""
    if isinstance(output, Tensor):
        return None
    model_name, kind = type(model).__name__, type(output).__name__
    if not isinstance(output, tuple | dict):
        raise ConfigError(f"{model_name} returns a {kind}; {_OUTPUT_CURE}")
    for key, member in output.items() if isinstance(output, dict) else enumerate(output):
        if not isinstance(member, Tensor) or not isinstance(key, int | str):
            member_kind = type(member).__name__
            raise ConfigError(
                f"{model_name} returns a {kind} with a {member_kind} at {key!r}; {_OUTPUT_CURE}"
            )
    if not output:
        raise ConfigError(f"{model_name} returns an empty {kind}; {_OUTPUT_CURE}")
    return tuple(map(str, output)) if isinstance(output, dict) else None
