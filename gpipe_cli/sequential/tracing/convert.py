"""Turn a model into a LayerSequence, without a change to the model.

    sequence = to_sequential(model, sample)

The steps: trace a clone without storage, build graphs, choose cuts, distribute the model's own modules among the
layers, and compare the result with the model, bit by bit, at sizes that differ from the sample's. Models and samples
without values are not compared: there is nothing to compare but the recordings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.pytree import ModelInput, flatten, unflatten
from gpipe_cli.sequential.sequence import LayerSequence
from gpipe_cli.sequential.tracing.cuts import CutPoint, Dataflow, choose_cuts, cut_points, used_paths
from gpipe_cli.sequential.tracing.generalize import with_expressions_computed
from gpipe_cli.sequential.tracing.graph import DecisionChanged, SourceLine
from gpipe_cli.sequential.tracing.layers import Segment, build_layers, segments_of
from gpipe_cli.sequential.tracing.leaves import Leaves, remedy
from gpipe_cli.sequential.tracing.recordings import (
    Trace,
    attributes_restored,
    caches_disabled,
    modes_restored,
)
from gpipe_cli.sequential.tracing.sample import SampleArguments, Size, TraceSample, shapes_of
from gpipe_cli.sequential.tracing.substitutes import buffers_restored
from gpipe_cli.torch_internals.deferred_values import without_recording

_BATCH = 3


@without_recording()
def to_sequential(model: nn.Module, sample: ModelInput, leaves: Iterable[str] = ()) -> LayerSequence:
    """Return the model as a sequence of layers that share its modules, parameters and names.

    sample: an input of the model: a tensor, a tuple of positional arguments, or a dict of keyword arguments. The
        sequence takes the same kind. Meta tensors will do, unless the model looks at values, such as a mask.
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
    _check_modes(sequence, model)
    trace.raise_least(partial(_is_right_at, sequence, model, inputs))
    layers[0].input_check = trace.input_check
    _verify(sequence, model, inputs, trace.other_sizes)
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


def _check_modes(sequence: LayerSequence, model: nn.Module) -> None:
    """Refuse a model whose `train` does more than set the mode of every module: layers do not call it."""
    with modes_restored(model, sequence):
        for training in (True, False):
            wanted = {path: part.training for path, part in model.train(training).named_modules()}
            sequence.train(training)
            for path, part in model.named_modules():
                if part.training != wanted[path]:
                    owner = next((m for m in model.modules() if type(m).train is not nn.Module.train), model)
                    raise ConfigError(
                        f"{type(model).__name__} cannot be traced: {SourceLine.defining(type(owner).train)}: "
                        f"train({training}) leaves '{path}' in another mode, and layers do not call it; override "
                        f"train() in that module, or {remedy(model, path)}"
                    )


def _verify(sequence: LayerSequence, model: nn.Module, sample: TraceSample, sizes: dict[Size, int]) -> None:
    """Refuse a sequence whose outputs differ from the model's; `sizes` are other than those of the sample."""
    if not _have_values(model, sample):
        return
    resized = sample.resized({**sizes, sample.sizes[0]: _BATCH})
    with _unchanged(model, sequence):
        if len({part.training for part in model.modules()}) > 1:
            _compare(sequence, model, resized, sample)
        for inputs in (resized, *sample.other_masks()):
            for training in (True, False):
                _compare(sequence.train(training), model.train(training), inputs, sample)


def _is_right_at(
    sequence: LayerSequence, model: nn.Module, sample: TraceSample, sizes: dict[Size, int]
) -> bool:
    """Whether the outputs are the model's at these sizes, in each mode in which the model accepts them."""
    if not _have_values(model, sample):
        return True
    inputs = sample.resized({sample.sizes[0]: _BATCH, **sizes})
    with _unchanged(model, sequence):
        for training in (True, False):
            try:
                expected, _ = _run(model.train(training), model, *_copied((inputs.args, inputs.kwargs)))
            except Exception:  # noqa: BLE001 - the model's own code refuses the sizes, in whatever way it likes
                continue
            try:
                actual, _ = _run(sequence.train(training), model, *_copied(((sample.value_of(inputs),), {})))
            except Exception:  # noqa: BLE001 - and the layers do not
                return False
            if not _equal(expected, actual):
                return False
    return True


def _have_values(model: nn.Module, sample: TraceSample) -> bool:
    return not any(tensor.is_meta for tensor in chain(sample.tensors, model.parameters(), model.buffers()))


def _compare(sequence: LayerSequence, model: nn.Module, inputs: SampleArguments, sample: TraceSample) -> None:
    mode = "training" if model.training else "evaluation"
    shapes = shapes_of(inputs.tensors.values())
    try:
        expected, expected_outputs = _run(model, model, *_copied((inputs.args, inputs.kwargs)))
        actual, actual_outputs = _run(sequence, model, *_copied(((sample.value_of(inputs),), {})))
    except DecisionChanged as error:
        raise ConfigError(f"{type(model).__name__} cannot be traced: {error}") from error
    except Exception as error:  # the model's own code may raise anything
        raise ConfigError(
            f"{type(model).__name__} cannot be traced: {SourceLine.raising(error)}: for an input of shape {shapes} in "
            f"{mode} it raises {type(error).__name__}: {error}; {remedy(model, '')}"
        ) from error
    if _equal(expected, actual):
        return
    pairs = zip(expected_outputs, actual_outputs, strict=False)
    differing = next((path for (path, left), (_, right) in pairs if not _equal(left, right)), None)
    where = "" if differing is None else f", first in '{differing}'"
    around = "" if differing is None else differing.rpartition(".")[0]
    line = SourceLine.defining(type(model.get_submodule(around)).forward)
    raise ConfigError(
        f"{type(model).__name__} cannot be traced: {line}: for an input of shape {shapes} the traced layers return "
        f"something else than the model in {mode}{where}; {remedy(model, around)}"
    )


def _run(
    module: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[tuple[str, Any]]]:
    """Return what a module returns, and what the modules of the model return meanwhile, with their paths."""
    outputs: list[tuple[str, Any]] = []
    handles = [
        part.register_forward_hook(lambda _module, _args, output, path=path: outputs.append((path, output)))
        for path, part in model.named_modules()
        if next(part.children(), None) is None and not isinstance(part, torch.jit.ScriptModule)
    ]
    try:
        with _same_random_numbers(), buffers_restored(model):
            return module(*args, **kwargs), outputs
    finally:
        for handle in handles:
            handle.remove()


def _copied(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the tensors, since a forward may write to its inputs."""
    tensors, template = flatten(arguments, "input")
    args, kwargs = unflatten(template, [tensor.clone() for tensor in tensors])
    return args, kwargs


def _equal(left: Any, right: Any) -> bool:
    (left_tensors, _), (right_tensors, _) = flatten(left, "output"), flatten(right, "output")
    return len(left_tensors) == len(right_tensors) and all(
        one.shape == other.shape
        and one.dtype == other.dtype
        and (torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
        for one, other in zip(left_tensors, right_tensors, strict=True)
    )


@contextmanager
def _unchanged(model: nn.Module, sequence: LayerSequence) -> Iterator[None]:
    with (
        modes_restored(model, sequence),
        attributes_restored(model),
        caches_disabled(model),
        torch.no_grad(),
    ):
        yield


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
