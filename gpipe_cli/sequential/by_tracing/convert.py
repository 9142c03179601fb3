"""Any model that torch.fx can trace becomes a Sequence, without a change to it.

    sequence = to_sequential(model, sample)

The steps: clone the model without storage, trace the clone in training and in evaluation, find out what
flows, choose cuts, and share the model's own modules out among the layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor, nn

from gpipe_cli.sequential.by_tracing.borders import borders_of
from gpipe_cli.sequential.by_tracing.build import build_layers
from gpipe_cli.sequential.by_tracing.cuts import choose_cuts
from gpipe_cli.sequential.by_tracing.flow import Flow
from gpipe_cli.sequential.by_tracing.layer import Stretch
from gpipe_cli.sequential.by_tracing.leaves import Leaves
from gpipe_cli.sequential.by_tracing.modes import unified
from gpipe_cli.sequential.by_tracing.names import layer_names
from gpipe_cli.sequential.by_tracing.outputs import output_names
from gpipe_cli.sequential.by_tracing.tracer import trace
from gpipe_cli.sequential.by_tracing.values import follow
from gpipe_cli.sequential.meta_clone import meta_clone
from gpipe_cli.sequential.sequence import Sequence

__all__ = ["to_sequential"]


def to_sequential(
    model: nn.Module, sample: Tensor | tuple[Tensor, ...], leaves: Iterable[str] = ()
) -> Sequence:
    """The model as a sequence of layers that share its modules, parameters and names.

    sample: an input as the model takes it, or a tuple of its positional arguments; a meta tensor will do.
    leaves: paths or classes of submodules that are to stay whole.

    A dict that the model returns is a tuple in the last layer and a dict again when the sequence is called.
    Both modes behave as the model's: `training` is read when a layer runs. Other Python attributes of
    modules that have children are fixed as they are now, and hooks on such modules are lost.
    """
    inputs = sample if isinstance(sample, tuple) else (sample,)
    whole = Leaves(model, leaves)
    clone = meta_clone(model)
    flows = _flows(model, clone, whole, inputs)
    holders = sum(flow.holders(len(flow.steps)) for flow in flows)
    cuts = choose_cuts(borders_of(flows, clone), holders)
    ends = [tuple(0 for _ in flows), *(cut.places for cut in cuts), tuple(len(flow.steps) for flow in flows)]
    stretches = [
        [
            Stretch(flow, start, stop, stops is ends[-1])
            for flow, start, stop in zip(flows, starts, stops, strict=True)
        ]
        for starts, stops in pairwise(ends)
    ]
    layers = build_layers(model, clone, whole, stretches, isinstance(sample, tuple))
    names = layer_names(
        [[path for one in group for step in one.steps for path in one.flow.held(step)] for group in stretches]
    )
    modes = zip((True, False), (flows[0], flows[-1]), strict=True)
    output_names = {mode: flow.output_names for mode, flow in modes if flow.output_names is not None}
    return Sequence(layers, paths=[""] * len(layers), names=names, original=model, output_names=output_names)


def _flows(model: nn.Module, clone: nn.Module, leaves: Leaves, inputs: tuple[Tensor, ...]) -> list[Flow]:
    """One where both modes have the same graph, else that of training and that of evaluation."""
    training, evaluation = (trace(clone, leaves, len(inputs), mode) for mode in (True, False))
    both = unified(training, evaluation, clone)
    modes = {training: [True], evaluation: [False]} if both is None else {both: [True, False]}
    values = {graph: follow(graph, model, clone, inputs, of_graph) for graph, of_graph in modes.items()}
    return [Flow(graph, found, output_names(model, found.output)) for graph, found in values.items()]
