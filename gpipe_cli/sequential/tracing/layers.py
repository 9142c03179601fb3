"""The layers of a traced model: their code in each mode, and the parts of the model that each of them holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

from torch import Tensor, fx, nn

from gpipe_cli.pytree import SINGLE
from gpipe_cli.sequential.deferred import copy_module
from gpipe_cli.sequential.sequence import named_tensors
from gpipe_cli.sequential.tracing.cuts import attribute_paths
from gpipe_cli.sequential.tracing.leaves import Leaves
from gpipe_cli.sequential.tracing.sample import InputCheck
from gpipe_cli.sequential.tracing.segments import Segment, segment_graph
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
