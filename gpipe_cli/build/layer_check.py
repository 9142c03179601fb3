"""Runs a sequence on a sample before training, so that an error names the layer that does not fit.

The layers run once on the meta device. Where a layer needs values, they run for real, on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.context import MicroBatch, Running
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.profiling.equal_layers import layer_key
from gpipe_cli.pytree import ModelInput, flatten, map_tensors
from gpipe_cli.sequential import layer_class, layer_names
from gpipe_cli.sequential.deferred import meta_clone, meta_like
from gpipe_cli.skip.tracker import DictionarySkipTracker, use_skip_tracker


class LayerMisfit(Exception):
    """A layer raised. The message says what it received; the cause is what it raised."""

    def __init__(self, layer: str, message: str) -> None:
        super().__init__(f"{layer} {message}")
        self.layer = layer


def check_input(sequence: nn.Sequential, sample: ModelInput) -> None:
    """Raise ConfigError if the first layer takes one tensor where the input is a tuple or a dict of them."""
    if isinstance(sample, Tensor):
        return
    first = sequence[:1]
    assert isinstance(first, nn.Sequential), "a slice of a sequence is one"
    try:
        meta_output(first, sample)
    except LayerMisfit as misfit:
        if isinstance(misfit.__cause__, TypeError | AttributeError):
            raise ConfigError(
                f"{misfit}; choose a model that takes such arguments, or data whose inputs are one tensor"
            ) from misfit.__cause__


def check_outputs(sequence: nn.Sequential, sample: ModelInput) -> None:
    """Raise ConfigError if a layer returns something that cannot pass between layers.

    A layer that raises is ignored: if its code is wrong, the first step reports it.
    """
    find_misfit(meta_output, sequence, sample)


def check_fit(sequence: nn.Sequential, sample: ModelInput, hint: str) -> None:
    """Raise ConfigError if a layer does not accept its predecessor's output, or returns what cannot pass on."""
    try:
        meta_output(sequence, sample)
    except LayerMisfit as misfit:
        if any(tensor.is_meta for tensor in (*tensors_of(sample), *sequence.parameters())):
            raise ConfigError(f"{misfit}; {hint}") from misfit.__cause__
    else:
        return
    try:
        run_copy(sequence, sample)
    except LayerMisfit as misfit:
        raise ConfigError(f"{misfit}; {hint}") from misfit.__cause__


def check_first_layer(sequence: nn.Sequential, sample: ModelInput) -> None:
    """Raise LayerMisfit if the first layer with parameters rejects the sample.

    It runs with zeros for parameters: on the meta device it would accept any dtype, and say less of what it rejects.
    """
    count = next((number for number, layer in enumerate(sequence, 1) if [*layer.parameters()]), 0)
    first = sequence[:count]
    assert isinstance(first, nn.Sequential), "a slice of a sequence is one"
    if any(isinstance(part, nn.Embedding) for part in first.modules()):
        return
    with_zeros = meta_clone(first).to_empty(device="cpu").eval()
    for tensor in (*with_zeros.parameters(), *with_zeros.buffers()):
        tensor.detach().zero_()
    _run(with_zeros, layer_names(sequence)[:count], sample)


def layer_that_rejects_one_row(sequence: nn.Sequential, sample: ModelInput) -> str | None:
    """The layer that accepts two rows but not one in training, such as a batch norm with one value per channel.

    sample: two rows.
    """
    one_row: ModelInput = map_tensors(lambda tensor: tensor[:1], sample)
    has_values = not any(tensor.is_meta for tensor in (*tensors_of(sample), *sequence.parameters()))
    for run in (meta_output, run_copy)[: 1 + has_values]:
        misfit = find_misfit(run, sequence, one_row)
        if misfit is None:
            return None
        # If two rows fail as well, a layer needs values, which the second run has, or the layer is broken.
        if find_misfit(run, sequence, sample) is None:
            return misfit.layer
    return None


def find_misfit(
    run: Callable[[nn.Sequential, ModelInput], Any], sequence: nn.Sequential, sample: ModelInput
) -> LayerMisfit | None:
    """What a layer rejects if `meta_output` or `run_copy` runs; None if no layer raises."""
    try:
        run(sequence, sample)
    except LayerMisfit as misfit:
        return misfit
    return None


def meta_output(sequence: nn.Sequential, sample: ModelInput) -> Any:
    """The output of the last layer on the meta device; LayerMisfit if a layer raises.

    Of equal layers with equal inputs only the first one runs.
    """
    outputs: dict[Hashable, Any] = {}

    def call(layer: nn.Module, value: Any) -> Any:
        key = layer_key(layer, value)
        if key not in outputs:
            outputs[key] = meta_clone(layer).train()(value)
        return outputs[key]

    with torch.device("meta"):
        return _run(sequence, layer_names(sequence), map_tensors(meta_like, sample), call)


def run_copy(sequence: nn.Sequential, sample: ModelInput) -> Any:
    """The output of the last layer, computed with values; LayerMisfit if a layer raises."""
    return _run(copy.deepcopy(sequence).train(), layer_names(sequence), sample)


@torch.no_grad()
def _run(
    layers: nn.Module,
    names: tuple[str, ...],
    value: Any,
    call: Callable[[nn.Module, Any], Any] = lambda layer, value: layer(value),
) -> Any:
    with (
        Running(MicroBatch(0, len(tensors_of(value)[0]))),
        use_skip_tracker(DictionarySkipTracker()),
        torch.random.fork_rng(devices=[]),
    ):
        for name, layer in zip(names, layers.children(), strict=True):
            subject = f"layer '{name}' ({layer_class(layer)})"
            given = _described(value)
            try:
                value = call(layer, value)
            except (
                Exception,
                SystemExit,
            ) as error:  # its code, given what it may not expect, may do anything
                reason = str(error).partition("\n")[0] or type(error).__name__
                raise LayerMisfit(subject, f"does not take {given}: {reason}") from error
            _check_carried(subject, value)
    return value


def _check_carried(subject: str, value: Any) -> None:
    try:
        tensors, _ = flatten(value, "output")
    except TypeError as error:
        raise _not_carried(subject, str(error)) from error
    if not tensors:
        raise _not_carried(subject, f"its output, of type {type(value).__name__}, holds no tensor")


def _not_carried(subject: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{subject} returns what no pipe carries: {reason}. Between layers go tensors and plain values, in any nesting "
        "of tuples, lists and dicts; return that, or keep the layer and the one that takes it in one module"
    )


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return "a dict of " + " and ".join(
            f"{key} {_described(member) or member}" for key, member in value.items()
        )
    return " and ".join("x".join(map(str, tensor.shape)) for tensor in tensors_of(value))
