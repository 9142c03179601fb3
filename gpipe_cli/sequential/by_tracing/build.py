"""Layers out of stretches: who holds which part of the model.

Every parameter and buffer of the model ends up in a layer, used or not, so that no name is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from torch import Tensor, nn

from gpipe_cli.sequential.by_tracing.flow import reads
from gpipe_cli.sequential.by_tracing.layer import Stretch, TracedLayer, stretch_graph
from gpipe_cli.sequential.by_tracing.leaves import Leaves
from gpipe_cli.sequential.by_tracing.tree import Planter

__all__ = ["build_layers"]


def build_layers(
    model: nn.Module,
    clone: nn.Module,
    leaves: Leaves,
    stretches: Sequence[Sequence[Stretch]],
    is_tuple: bool,
) -> list[TracedLayer]:
    """One layer for each group of stretches: that of both modes, or those of training and evaluation."""
    planter = Planter(model, clone)
    layers = [_planted(planter, of_layer, model.training) for of_layer in stretches]
    _plant_the_rest(planter, model, leaves, layers)
    for layer, of_layer in zip(layers, stretches, strict=True):
        graphs = [stretch_graph(stretch, is_tuple) for stretch in of_layer]
        layer.set_graphs(training=graphs[0], evaluation=graphs[-1])
    return layers


def _planted(planter: Planter, stretches: Sequence[Stretch], training: bool) -> TracedLayer:
    layer = TracedLayer()
    layer.training = training
    called = {str(step.target) for one in stretches for step in one.steps if step.op == "call_module"}
    # A leaf comes before what is called inside it, which then is there already.
    for path in sorted(called, key=lambda path: path.count(".")):
        planter.module(layer, path)
    for stretch in stretches:
        last = [stretch.flow.output] if stretch.is_last else []
        for path in (path for step in (*stretch.steps, *last) for path in reads(step)):
            planter.attribute(layer, path)
    return layer


def _plant_the_rest(
    planter: Planter, model: nn.Module, leaves: Leaves, layers: Sequence[TracedLayer]
) -> None:
    """Tensors that are never used, and second names of those that are."""
    homes = {name: layer for layer in layers for name, _ in _members(layer)}
    by_tensor = {id(tensor): layer for layer in layers for _, tensor in _members(layer)}
    for name, tensor in _members(model):
        if name in homes:
            continue
        layer = by_tensor.get(id(tensor)) or _nearest(homes, name) or layers[0]
        whole = leaves.outermost(model, name.rpartition(".")[0])
        if whole is not None:
            planter.module(layer, whole)
        planter.attribute(layer, name)
        homes |= {held: layer for held, _ in _members(layer)}


def _nearest(homes: dict[str, TracedLayer], name: str) -> TracedLayer | None:
    """The layer that holds the most of what is around a name."""
    while name := name.rpartition(".")[0]:
        for held, layer in homes.items():
            if held.startswith(f"{name}."):
                return layer
    return None


def _members(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )
