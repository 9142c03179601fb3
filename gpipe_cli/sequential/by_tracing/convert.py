"""Any model that torch.fx can trace becomes a Sequence, without a change to it.

    sequence = to_sequential(model, sample)

The steps: clone the model without storage, trace the clone in training and in evaluation, find out what
flows, choose cuts, and share the model's own modules out among the layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.by_tracing.borders import borders_of
from gpipe_cli.sequential.by_tracing.build import build_layers
from gpipe_cli.sequential.by_tracing.cuts import choose_cuts
from gpipe_cli.sequential.by_tracing.flow import Flow
from gpipe_cli.sequential.by_tracing.layer import Stretch
from gpipe_cli.sequential.by_tracing.leaves import Leaves
from gpipe_cli.sequential.by_tracing.meta_clone import meta_clone
from gpipe_cli.sequential.by_tracing.modes import unified
from gpipe_cli.sequential.by_tracing.names import layer_names
from gpipe_cli.sequential.by_tracing.tracer import trace
from gpipe_cli.sequential.by_tracing.values import follow
from gpipe_cli.sequential.sequence import Sequence

__all__ = ["to_sequential"]


def to_sequential(
    model: nn.Module, sample: Tensor | tuple[Tensor, ...], leaves: Iterable[str] = ()
) -> Sequence:
    """The model as a sequence of layers that share its modules, parameters and names.

    sample: an input as the model takes it, or a tuple of its positional arguments; a meta tensor will do.
    leaves: paths or classes of submodules that are to stay whole.

    Both modes behave as the model's: `training` is read when a layer runs. Other Python attributes of
    modules that have children are fixed as they are now, and hooks on such modules are lost.
    """
    inputs = sample if isinstance(sample, tuple) else (sample,)
    whole = Leaves(model, leaves)
    clone = meta_clone(model)
    flows = _flows(model, clone, whole, inputs)
    for flow in flows:
        _check_output(model, flow.facts[flow.output].kind)
    holders = sum(flow.holders(len(flow.steps)) for flow in flows)
    cuts = choose_cuts(borders_of(flows, clone), holders)
    ends = [tuple(0 for _ in flows), *(cut.places for cut in cuts), tuple(len(flow.steps) for flow in flows)]
    stretches = [
        [Stretch(flow, start, stop) for flow, start, stop in zip(flows, *bounds, strict=True)]
        for bounds in pairwise(ends)
    ]
    layers = build_layers(model, clone, whole, stretches, isinstance(sample, tuple))
    names = layer_names(
        [[path for one in group for step in one.steps for path in one.flow.held(step)] for group in stretches]
    )
    return Sequence(layers, paths=[""] * len(layers), names=names, original=model)


def _flows(model: nn.Module, clone: nn.Module, leaves: Leaves, inputs: tuple[Tensor, ...]) -> list[Flow]:
    """One where both modes have the same graph, else that of training and that of evaluation."""
    training, evaluation = (trace(clone, leaves, len(inputs), mode) for mode in (True, False))
    both = unified(training, evaluation, clone)
    modes = {training: [True], evaluation: [False]} if both is None else {both: [True, False]}
    return [Flow(graph, follow(graph, model, clone, inputs, of_graph)) for graph, of_graph in modes.items()]


def _check_output(model: nn.Module, kind: type) -> None:
    if not issubclass(kind, Tensor | tuple):
        raise ConfigError(
            f"{type(model).__name__} returns a {kind.__name__}; a pipe gives a tensor or a tuple of tensors, "
            "so wrap the model in a module that returns one of these"
        )
