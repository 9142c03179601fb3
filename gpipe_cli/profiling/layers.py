"""Time and memory of every layer, measured as the pipeline runs it: each layer is a partition of its own.

So in-place layers, skips, tuples, integer inputs and keyed randomness need nothing special here. All run on one
worker, one after the other, with the thread count of the caller. The model is left as it was found.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.buffers import all_buffers, restore, save
from gpipe_cli.pipeline.gpipe import GPipe
from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import Value, tensors_of
from gpipe_cli.schedule.action import Action
from gpipe_cli.sequential import layer_names

WARM_UP = 2
MOST_REPEATS = 50


@final
@dataclass(frozen=True)
class LayerProfile:
    index: int
    name: str
    type: str
    parameters: int
    parameter_bytes: int
    saved_bytes: int
    """Kept for backward, parameters excepted, each storage counted once."""
    output_shape: tuple[tuple[int, ...], ...]
    forward_ms: float
    backward_ms: float


@final
@dataclass(frozen=True)
class Sample:
    """One micro-batch to measure with; a loss counts as part of the last layer, as in a pipeline."""

    input: Value
    target: Tensor | None = None
    loss: LossFunction | None = None


def profile_layers(
    module: nn.Sequential, sample: Sample, *, seconds: float = 1.0, repeats: int = 5
) -> list[LayerProfile]:
    """Medians of at least `repeats` runs, and of more while `seconds` last."""
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient")
    device = tensors_of(sample.input)[0].device
    with _left_as_found(module):
        pipe = GPipe(module, [1] * len(module), devices=[device], checkpoint="never", schedule="interleaved")
        with pipe:
            seen = _look(pipe, sample)
            times = _measure(pipe, sample, seconds, repeats)
    return [
        LayerProfile(
            index=index,
            name=name,
            type=type(layer).__name__,
            parameters=sum(one.numel() for one in layer.parameters()),
            parameter_bytes=sum(one.nbytes for one in layer.parameters()),
            saved_bytes=seen[index].saved_bytes,
            output_shape=seen[index].output_shape,
            forward_ms=1000 * statistics.median(times[index, "forward"]),
            backward_ms=1000 * statistics.median(times.get((index, "backward"), [0.0])),
        )
        for index, (name, layer) in enumerate(zip(layer_names(module), module, strict=True))
    ]


@contextmanager
def _left_as_found(module: nn.Module) -> Iterator[None]:
    """Train mode inside; afterwards modes, buffers and gradients are what they were."""
    modes = [(one, one.training) for one in module.modules()]
    buffers = save(all_buffers([module]))
    module.train()
    try:
        yield
    finally:
        restore(buffers)
        for parameter in module.parameters():
            parameter.grad = None
        for one, training in modes:
            one.training = training


def _step(pipe: GPipe, sample: Sample) -> None:
    if sample.loss is not None and sample.target is not None:
        pipe.step(sample.input, sample.target, sample.loss, key=0)
        return
    # The pipe draws its key from torch's default generator, which must be left where it was.
    with torch.random.fork_rng(devices=[]):
        output = pipe(sample.input)
    outputs = [one for one in tensors_of(output) if one.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])


def _measure(pipe: GPipe, sample: Sample, seconds: float, repeats: int) -> dict[tuple[int, str], list[float]]:
    times: dict[tuple[int, str], list[float]] = defaultdict(list)

    def record(action: Action, phase: str, begin: float, end: float) -> None:
        times[action.partition, phase].append(end - begin)

    for _ in range(WARM_UP):
        _step(pipe, sample)
    pipe.recorder = record
    deadline = time.perf_counter() + seconds
    for run in range(MOST_REPEATS):
        if run >= repeats and time.perf_counter() > deadline:
            break
        _step(pipe, sample)
    pipe.recorder = None
    return times


@final
class _Seen:
    """What one layer's forward kept and gave."""

    def __init__(self, parameters: set[int]) -> None:
        self._parameters = parameters
        self._storages: dict[int, int] = {}
        self.output_shape: tuple[tuple[int, ...], ...] = ()
        self._hooks: Any = None

    @property
    def saved_bytes(self) -> int:
        return sum(self._storages.values())

    def before(self, layer: nn.Module, inputs: Any) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)
        self._hooks.__enter__()

    def after(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._hooks.__exit__(None, None, None)
        self.output_shape = tuple(tuple(one.shape) for one in tensors_of(output) if isinstance(one, Tensor))

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def _look(pipe: GPipe, sample: Sample) -> list[_Seen]:
    """One step with hooks around every layer."""
    parameters = {one.untyped_storage().data_ptr() for one in pipe.parameters()}
    seen = [_Seen(parameters) for _ in pipe]
    handles = []
    for one, layer in zip(seen, pipe, strict=True):
        handles.append(layer.register_forward_pre_hook(one.before))
        handles.append(layer.register_forward_hook(one.after))
    try:
        _step(pipe, sample)
    finally:
        for handle in handles:
            handle.remove()
    return seen
