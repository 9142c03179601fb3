"""A traced layer: the code of a segment of a model's graph, and the form in which values enter and leave it.

A single tensor crosses between layers as it is, several as a tuple. A size crosses as an empty tensor of that shape,
because pipelines carry tensors only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, fx, nn

from gpipe_cli.sequential.by_tracing.graph import current_device
from gpipe_cli.sequential.by_tracing.routes import Segment
from gpipe_cli.sequential.by_tracing.sample import InputCheck
from gpipe_cli.skip.namespace import Namespace, SkipName
from gpipe_cli.skip.tracker import load_skip, save_skip

Code: TypeAlias = Callable[..., Any]
"""A layer's forward in one mode: of the module, its input and the skips it pops."""


@final
class TracedLayer(nn.Module):
    """Holds parts of the model at their original paths; its code comes from the model's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.input_check: InputCheck | None = None
        """Set on the first layer."""
        self.traced_class = ""
        """Of the module whose code this layer is, if it is that of a whole module."""
        self._pops: list[SkipName] = []
        self._stashes: list[SkipName] = []
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

    def set_skips(self, namespace: Namespace, pops: Sequence[str], stashes: Sequence[str]) -> None:
        self._pops = [SkipName(namespace, name) for name in pops]
        self._stashes = [SkipName(namespace, name) for name in stashes]

    def poppable(self) -> list[SkipName]:
        return sorted(self._pops)

    def stashable(self) -> list[SkipName]:
        return sorted(self._stashes)

    def forward(self, input: Any) -> Any:
        if self.input_check is not None:
            self.input_check(input)
        output = self._code[self.training](self, input, *map(load_skip, self._pops))
        if self._stashes:
            output, values = output
            for name, value in zip(self._stashes, values, strict=True):
                save_skip(name, value)
        return output

    # Generated code cannot be pickled, but the graphs it is generated from can.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_code"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.set_graphs(self._graphs[True], self._graphs[False])


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
        if step.target is current_device:
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
