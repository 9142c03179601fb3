"""Compare a traced sequence with its model, to the bit, at sizes that differ from the sample's.

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
from gpipe_cli.pytree import flatten
from gpipe_cli.sequential.by_tracing.sample import Inputs, Sample, Size
from gpipe_cli.sequential.by_tracing.trace import caches_disabled
from gpipe_cli.sequential.sequence import Sequence

_BATCH = 3


def verify(sequence: Sequence, model: nn.Module, sample: Sample, sizes: dict[Size, int]) -> None:
    """Refuse a sequence whose outputs differ from the model's; `sizes` are other than those of the sample."""
    if any(tensor.is_meta for tensor in chain(sample.tensors, model.parameters(), model.buffers())):
        return
    samples = [sample.resized({**sizes, sample.sizes[0]: _BATCH})]
    if sample.masks:
        samples.append(sample.without_padding())
    with _modes_restored(model, sequence), caches_disabled(model), torch.no_grad():
        for inputs in samples:
            for training in (True, False):
                _compare(sequence.train(training), model.train(training), inputs, sample)


def _compare(sequence: Sequence, model: nn.Module, inputs: Inputs, sample: Sample) -> None:
    expected, expected_outputs = _run(model, model, inputs.args, inputs.kwargs)
    actual, actual_outputs = _run(sequence, model, (sample.value_of(inputs),), {})
    if _equal(expected, actual):
        return
    mode = "training" if model.training else "evaluation"
    shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in inputs.tensors.values())
    pairs = zip(expected_outputs, actual_outputs, strict=False)
    differing = next((path for (path, left), (_, right) in pairs if not _equal(left, right)), None)
    where = "" if differing is None else f", first in '{differing}'"
    raise ConfigError(
        f"{type(model).__name__} cannot be traced: for an input of shape {shapes} the traced layers return something "
        f"else than the model in {mode}{where}; keep the module around it whole with model.leaves, or give model.layers"
    )


def _run(
    module: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[tuple[str, Any]]]:
    """Return what a module returns, and what the modules of the model return meanwhile, with their paths."""
    outputs: list[tuple[str, Any]] = []
    handles = [
        part.register_forward_hook(lambda _module, _args, output, path=path: outputs.append((path, output)))
        for path, part in model.named_modules()
        if next(part.children(), None) is None
    ]
    try:
        with _same_random_numbers(), _buffers_restored(model):
            return module(*args, **kwargs), outputs
    finally:
        for handle in handles:
            handle.remove()


def _equal(left: Any, right: Any) -> bool:
    (left_tensors, _), (right_tensors, _) = flatten(left, "output"), flatten(right, "output")
    return len(left_tensors) == len(right_tensors) and all(
        one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(left_tensors, right_tensors, strict=True)
    )


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    """Put the values of buffers back, such as the statistics of batch norm."""
    before: list[tuple[Tensor, Tensor]] = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, values in before:
            buffer.copy_(values)


@contextmanager
def _modes_restored(*roots: nn.Module) -> Iterator[None]:
    modes = {module: module.training for root in roots for module in root.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
