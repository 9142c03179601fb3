"""Compare a traced sequence with its model, bit by bit, at sizes that differ from the sample's.

Models and samples without values are not compared: there is nothing to compare but the recordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.pytree import flatten, unflatten
from gpipe_cli.sequential.sequence import LayerSequence
from gpipe_cli.sequential.tracing.graph import DecisionChanged, SourceLine
from gpipe_cli.sequential.tracing.leaves import remedy
from gpipe_cli.sequential.tracing.recordings import attributes_restored, caches_disabled, modes_restored
from gpipe_cli.sequential.tracing.sample import SampleArguments, Size, TraceSample, shapes_of
from gpipe_cli.sequential.tracing.substitutes import buffers_restored

_BATCH = 3


def check_modes(sequence: LayerSequence, model: nn.Module) -> None:
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


def verify(sequence: LayerSequence, model: nn.Module, sample: TraceSample, sizes: dict[Size, int]) -> None:
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


def is_right_at(
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
        one.shape == other.shape and one.dtype == other.dtype and _same_values(one, other)
        for one, other in zip(left_tensors, right_tensors, strict=True)
    )


def _same_values(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


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
