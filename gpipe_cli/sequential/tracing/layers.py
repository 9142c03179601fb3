"""The layers of a traced model: what enters and leaves them, their code in each mode, and the parts they hold.

A value goes to the next layer that uses it, and from there to the one after: as part of the output if that is the
following layer, otherwise as a skip, straight past the layers in between. Backward thus adds up the gradients of a
value's uses in the same order as without a pipeline. Values that no later layer uses are not carried.

A single tensor crosses between layers as it is, several as a tuple. A size of the input is read from a tensor that has
it. Only where no such tensor arrives does it cross, as an empty tensor of that shape, because pipelines carry tensors.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, fx, nn

from gpipe_cli.pytree import SINGLE
from gpipe_cli.sequential.deferred import copy_module
from gpipe_cli.sequential.sequence import named_tensors
from gpipe_cli.sequential.tracing.cuts import Dataflow, attribute_paths
from gpipe_cli.sequential.tracing.graph import device_of_input
from gpipe_cli.sequential.tracing.leaves import Leaves
from gpipe_cli.sequential.tracing.sample import InputCheck
from gpipe_cli.skip.tracker import Namespace, SkipName, load_skip, save_skip
from gpipe_cli.torch_internals.modules import adopt_version

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
        """The class of the module whose code this layer is, if it is that of a whole module."""
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


def build_layers(
    model: nn.Module,
    leaves: Leaves,
    segments: Sequence[Sequence[Segment]],
    input_paths: Sequence[tuple[Any, ...]],
    input_check: InputCheck,
) -> list[TracedLayer]:
    """Build a layer for each group of segments: one segment for both modes, or one per mode."""
    constants = {
        name: value for segment in segments[0] for name, value in segment.flow.trace.constants.items()
    }
    placer = _Placer(model, constants)
    layers = [_fill_layer(placer, group, model.training) for group in segments]
    _place_unused(placer, model, leaves, layers)
    namespace = Namespace()
    for layer, group in zip(layers, segments, strict=True):
        graphs = [
            segment_graph(segment, input_paths, segment.flow.trace.template == SINGLE) for segment in group
        ]
        layer.set_graphs(training=graphs[0], evaluation=graphs[-1])
        layer.set_skips(namespace, list(group[0].popped), list(group[0].stashed))
    layers[0].input_check = input_check
    return layers


def _fill_layer(placer: _Placer, segments: Sequence[Segment], training: bool) -> TracedLayer:
    layer = TracedLayer()
    layer.training = training
    steps = [step for segment in segments for step in segment.steps]
    # A dict, not a set, whose order and with it that of the layer's parameters would differ from run to run.
    called = dict.fromkeys(str(step.target) for step in steps if step.op == "call_module")
    # Outer modules first: a leaf brings along the modules that are called inside it.
    for path in sorted(called, key=lambda path: path.count(".")):
        placer.place_module(layer, path)
    for segment in segments:
        last = [segment.flow.output] if segment.is_last else []
        for path in (path for step in (*segment.steps, *last) for path in attribute_paths(step)):
            placer.place_attribute(layer, path)
    return layer


def _place_unused(placer: _Placer, model: nn.Module, leaves: Leaves, layers: Sequence[TracedLayer]) -> None:
    """Place tensors that are never used, and the second names of those that are."""
    layer_of = {name: layer for layer in layers for name, _ in named_tensors(layer)}
    layer_of_tensor = {id(tensor): layer for layer in layers for _, tensor in named_tensors(layer)}
    for name, tensor in named_tensors(model):
        if name in layer_of:
            continue
        layer = layer_of_tensor.get(id(tensor)) or _nearest(layer_of, name) or layers[0]
        leaf = leaves.outermost(name.rpartition(".")[0])
        if leaf is not None:
            placer.place_module(layer, leaf)
        placer.place_attribute(layer, name)
        layer_of |= {placed: layer for placed, _ in named_tensors(layer)}


def _nearest(layer_of: dict[str, TracedLayer], name: str) -> TracedLayer | None:
    """Return the layer that holds a tensor of the same module, or of the closest module around it."""
    while name := name.rpartition(".")[0]:
        for placed, layer in layer_of.items():
            if placed.startswith(f"{name}."):
                return layer
    return None


@final
class PartialModule(nn.Module):
    """An empty module that replaces one whose parts are in several layers; it keeps its name and `training`."""


@final
class _Placer:
    """Puts parts of a model into its layers, one layer after the other."""

    def __init__(self, model: nn.Module, constants: Mapping[str, Any]) -> None:
        self._model = model
        self._constants = constants
        self._persistent = frozenset(model.state_dict(keep_vars=True))
        self._layer_of: dict[nn.Module, nn.Module] = {}

    def place_module(self, layer: nn.Module, path: str) -> None:
        parent, _, name = path.rpartition(".")
        container = self._container(layer, parent)
        if hasattr(container, name):
            return
        module = self._model.get_submodule(path)
        # The first layer gets the module itself, others a replica with the same tensors: while a partition runs,
        # the pipeline writes aliases of shared parameters into the partition's own modules.
        if any(self._layer_of.setdefault(part, layer) is not layer for part in module.modules()):
            tensors = [*module.parameters(), *module.buffers()]
            module = copy_module(module, {id(tensor): tensor for tensor in tensors})
        container.add_module(name, module)

    def place_attribute(self, layer: nn.Module, path: str) -> None:
        """Place a parameter, a buffer or any other attribute; every container has `training` already."""
        parent, _, name = path.rpartition(".")
        container = self._container(layer, parent)
        if hasattr(container, name):
            return
        owner = self._model.get_submodule(parent)
        value: Any = self._constants[path] if path in self._constants else getattr(owner, name)
        if isinstance(value, nn.Parameter):
            container.register_parameter(name, value)
        elif isinstance(value, Tensor) and name in dict(owner.named_buffers(recurse=False)):
            container.register_buffer(name, value, persistent=path in self._persistent)
        else:
            setattr(container, name, value)

    def _container(self, layer: nn.Module, path: str) -> nn.Module:
        """Return the module at `path` in the layer; create containers on the way where there is none."""
        module, original = layer, self._model
        for name in path.split(".") if path else ():
            original = original.get_submodule(name)
            if not hasattr(module, name):
                container = PartialModule()
                container.training = original.training
                adopt_version(container, original)
                module.add_module(name, container)
            module = module.get_submodule(name)
        return module


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
