"""Turn any model that torch.fx can trace into a Sequence, without a change to the model.

    sequence = to_sequential(model, sample)

The steps: clone the model without storage, trace the clone in training and in evaluation, propagate shapes, choose
cuts, and distribute the model's own modules among the layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import pairwise

from torch import Tensor, nn

from gpipe_cli.sequential.by_tracing.build import build_layers
from gpipe_cli.sequential.by_tracing.cuts import Dataflow, choose_cuts, cut_points, used_paths
from gpipe_cli.sequential.by_tracing.layer import Segment, output_names
from gpipe_cli.sequential.by_tracing.modes import merge_modes
from gpipe_cli.sequential.by_tracing.shape_prop import propagate_shapes
from gpipe_cli.sequential.by_tracing.tracer import Leaves, trace
from gpipe_cli.sequential.sequence import Sequence
from gpipe_cli.sequential.without_storage import meta_clone


def to_sequential(
    model: nn.Module, sample: Tensor | tuple[Tensor, ...], leaves: Iterable[str] = ()
) -> Sequence:
    """Return the model as a sequence of layers that share its modules, parameters and names.

    sample: an input of the model, or a tuple of its positional arguments; meta tensors are fine.
    leaves: paths or classes of submodules to keep whole.

    If the model returns a dict, the last layer returns a tuple and the sequence a dict. The sequence behaves like the
    model in both modes: layers read `training` when they run. Other Python attributes of modules that have children
    are fixed at their current values, and hooks on such modules are lost.
    """
    inputs = sample if isinstance(sample, tuple) else (sample,)
    whole = Leaves(model, leaves)
    clone = meta_clone(model)
    flows = _dataflows(model, clone, whole, inputs)
    uses = sum(flow.uses(len(flow.steps)) for flow in flows)
    cuts = choose_cuts(cut_points(flows, clone), uses)
    start, end = tuple(0 for _ in flows), tuple(len(flow.steps) for flow in flows)
    ends = [start, *(cut.positions for cut in cuts), end]
    segments = [
        [
            Segment(flow, first, last, is_last=stop is end)
            for flow, first, last in zip(flows, start, stop, strict=True)
        ]
        for start, stop in pairwise(ends)
    ]
    layers = build_layers(model, clone, whole, segments, isinstance(sample, tuple))
    used = [
        [path for segment in group for step in segment.steps for path in used_paths(step)]
        for group in segments
    ]
    modes = {True: flows[0], False: flows[-1]}
    return Sequence(
        layers,
        paths=[""] * len(layers),
        names=[_whole_module(used, index) or _range(paths) for index, paths in enumerate(used)],
        original=model,
        output_names={
            mode: flow.output_names for mode, flow in modes.items() if flow.output_names is not None
        },
    )


def _dataflows(
    model: nn.Module, clone: nn.Module, leaves: Leaves, inputs: tuple[Tensor, ...]
) -> list[Dataflow]:
    """One if both modes can share a graph, otherwise that of training and that of evaluation."""
    training, evaluation = (trace(clone, leaves, len(inputs), mode) for mode in (True, False))
    merged = merge_modes(training, evaluation, clone)
    modes = {training: [True], evaluation: [False]} if merged is None else {merged: [True, False]}
    # Every graph runs before any output is judged: an input that the model does not accept is the first error.
    infos = {
        graph: propagate_shapes(graph, model, clone, inputs, of_graph) for graph, of_graph in modes.items()
    }
    return [Dataflow(graph, info, output_names(model, info.output)) for graph, info in infos.items()]


def _whole_module(used: SequenceOf[SequenceOf[str]], index: int) -> str:
    """Name a layer after the innermost module that all its paths are in, if no other layer uses a part of it."""
    name = _common_prefix(used[index])
    others = (path for other, paths in enumerate(used) if other != index for path in paths)
    return "" if any(f"{path}.".startswith(f"{name}.") for path in others) else name


def _range(paths: SequenceOf[str]) -> str:
    """Name a layer after its first and last path: `features.0..1` for features.0 to features.1."""
    if not paths:
        return "nothing"
    first, last = paths[0], paths[-1]
    prefix = _common_prefix([first, last])
    return first if first == last else f"{first}..{last.removeprefix(f'{prefix}.')}"


def _common_prefix(paths: SequenceOf[str]) -> str:
    common: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
