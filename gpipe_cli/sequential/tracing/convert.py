"""Turn a model into a LayerSequence, without a change to the model.

    sequence = to_sequential(model, sample)

The steps: trace a clone without storage, build graphs, choose cuts, distribute the model's own modules among the
layers, and compare the result with the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.pytree import ModelInput
from gpipe_cli.sequential.sequence import LayerSequence
from gpipe_cli.sequential.tracing.cuts import CutPoint, Dataflow, choose_cuts, cut_points, used_paths
from gpipe_cli.sequential.tracing.generalize import with_expressions_computed
from gpipe_cli.sequential.tracing.layers import build_layers
from gpipe_cli.sequential.tracing.leaves import Leaves, remedy
from gpipe_cli.sequential.tracing.recordings import Trace
from gpipe_cli.sequential.tracing.sample import TraceSample
from gpipe_cli.sequential.tracing.segments import Segment, segments_of
from gpipe_cli.sequential.tracing.verify import check_modes, is_right_at, verify
from gpipe_cli.torch_internals.deferred_values import without_recording


@without_recording()
def to_sequential(model: nn.Module, sample: ModelInput, leaves: Iterable[str] = ()) -> LayerSequence:
    """Return the model as a sequence of layers that share its modules, parameters and names.

    sample: an input of the model: a tensor, a tuple of positional arguments, or a dict of keyword arguments. The
        sequence takes the same kind. Meta tensors will do, unless the model looks at values, such as those of a mask.
    leaves: paths or classes of submodules to keep whole.

    The sequence returns what the model returns, and behaves like it in both modes: layers read `training` when they
    run. Other Python attributes of modules that have children are fixed at their current values.
    """
    inputs = TraceSample(sample)
    whole = Leaves(model, leaves)
    trace = Trace(model, inputs, whole)
    programs = list(dict.fromkeys(trace.programs.values()))
    graphs = [
        with_expressions_computed(program, inputs, f"_constant_{index}_")
        for index, program in enumerate(programs)
    ]
    flows = [Dataflow(graph) for graph in graphs]
    uses = sum(flow.uses(len(flow.steps)) for flow in flows)
    cuts = choose_cuts(cut_points(flows, model), uses)
    groups = _divide(flows, cuts, use_skips=True) or _divide(flows, cuts, use_skips=False)
    templates = {mode: programs.index(trace.programs[mode]) for mode in (True, False)}
    layers = build_layers(model, whole, groups, inputs.paths, trace.input_check)
    used = [
        [path for segment in group for step in segment.steps for path in used_paths(step)] for group in groups
    ]
    names = [_whole_module(used, index) or _range(paths) for index, paths in enumerate(used)]
    modules = dict(model.named_modules())
    for layer, name in zip(layers, names, strict=True):
        layer.traced_class = type(modules[name]).__name__ if name in modules else ""
    try:
        sequence = LayerSequence(
            layers,
            paths=[""] * len(layers),
            names=names,
            original=model,
            output_templates={mode: graphs[index].template for mode, index in templates.items()},
        )
    except ValueError as error:  # such as an attribute whose name a layer uses itself
        raise ConfigError(
            f"{type(model).__name__} cannot be traced: {error}; rename them, or {remedy(model, '')}"
        ) from error
    check_modes(sequence, model)
    trace.raise_least(partial(is_right_at, sequence, model, inputs))
    layers[0].input_check = trace.input_check
    verify(sequence, model, inputs, trace.other_sizes)
    return sequence


def _divide(
    flows: Sequence[Dataflow], cuts: Sequence[CutPoint], *, use_skips: bool
) -> list[tuple[Segment, ...]]:
    """The segments of each layer, one for both modes or one per mode; none if the modes disagree on a layer's skips."""
    divided = [
        segments_of(flow, [cut.positions[index] for cut in cuts], use_skips=use_skips)
        for index, flow in enumerate(flows)
    ]
    groups = list(zip(*divided, strict=True))
    # A layer declares its skips once.
    agree = all(segment.skip_names == group[0].skip_names for group in groups for segment in group)
    return groups if agree else []


def _whole_module(used: Sequence[Sequence[str]], index: int) -> str:
    """Name a layer after the innermost module that all its paths are in, if no other layer uses a part of it."""
    name = _common_prefix(used[index])
    others = (path for other, paths in enumerate(used) if other != index for path in paths)
    return "" if any(f"{path}.".startswith(f"{name}.") for path in others) else name


def _range(paths: Sequence[str]) -> str:
    """Name a layer after its first and last path: `features.0..1` for features.0 to features.1."""
    if not paths:
        return "nothing"
    first, last = paths[0], paths[-1]
    prefix = _common_prefix([first, last])
    return first if first == last else f"{first}..{last.removeprefix(f'{prefix}.')}"


def _common_prefix(paths: Sequence[str]) -> str:
    common: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
