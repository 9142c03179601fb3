"""Time and memory of every layer, measured as the pipeline runs it: each layer is a partition of its own.

So in-place layers, skips, tuples, integer inputs and keyed randomness need nothing special here. One worker runs all
layers one after the other, with the caller's thread count. The model is unchanged afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.gpipe import PlainPipe
from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import Value, moved, tensors_of
from gpipe_cli.pipeline.module_state import BufferState, buffer_owners, modules_of
from gpipe_cli.pipeline.partitioning import move_to_devices
from gpipe_cli.profiling.action_recorder import recording
from gpipe_cli.sequential import layer_class, layer_names
from gpipe_cli.torch_internals.tensor_memory import storage_of

Shape = tuple[int, ...]

WARM_UP = 2
MOST_REPEATS = 50


@final
@dataclass(frozen=True)
class LayerFacts:
    """What is known of a layer without timing it."""

    index: int
    name: str
    type: str
    parameters: int
    parameter_bytes: int
    saved_bytes: int
    """Saved for the backward of one micro-batch, parameters excepted, each storage counted once."""
    output_shape: tuple[Shape, ...]
    """One shape per tensor, skips left out."""
    output_bytes: int


@final
class SavedTensors:
    """A context manager to run a layer in. You may enter it again: a loss counts as part of the last layer."""

    def __init__(self, parameters: Collection[int]) -> None:
        """`parameters` are the storages that do not count."""
        self._parameters = parameters
        self._hooks: list[saved_tensors_hooks] = []
        self.storages: dict[int, int] = {}
        """The bytes of every storage saved: one of which several views are saved counts once."""
        self.output_shape: tuple[Shape, ...] = ()
        self.output_bytes = 0

    def __enter__(self) -> Self:
        hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.pop().__exit__(kind, error, trace)

    def leave_failed_layer(self) -> None:
        """Leave what a layer that raised has not left: autograd would call the hooks in this thread for ever."""
        while self._hooks:
            self.__exit__(None, None, None)

    def note_output(self, output: Any) -> None:
        # What runs the layer refuses a value of any other kind, with a better message than one from here.
        tensors = [tensor for tensor in tensors_of(output) if isinstance(tensor, Tensor)]
        self.output_shape = tuple(tuple(tensor.shape) for tensor in tensors)
        self.output_bytes = sum(tensor.nbytes for tensor in tensors)

    def including(self, loss: LossFunction) -> LossFunction:
        """The loss, with what it saves counted as this layer's."""

        def watched(output: Any, target: Any) -> Tensor:
            with self:
                return loss(output, target)

        return watched

    def with_storages(self, storages: dict[int, int]) -> SavedTensors:
        """The same of another layer, whose storages are others."""
        other = SavedTensors(self._parameters)
        other.storages = storages
        other.output_shape, other.output_bytes = self.output_shape, self.output_bytes
        return other

    def facts(self, index: int, name: str, layer: nn.Module) -> LayerFacts:
        return LayerFacts(
            index=index,
            name=name,
            type=layer_class(layer),
            parameters=sum(parameter.numel() for parameter in layer.parameters()),
            parameter_bytes=sum(parameter.nbytes for parameter in layer.parameters()),
            saved_bytes=sum(self.storages.values()),
            output_shape=self.output_shape,
            output_bytes=self.output_bytes,
        )

    def _pack(self, tensor: Tensor) -> Tensor:
        # Autograd calls this at the moment of saving; the tensor itself is kept, so backward runs as without the hook.
        storage = storage_of(tensor)
        if storage not in self._parameters:
            # The whole storage, even if a small view was saved: the view keeps all of it alive.
            self.storages[storage] = tensor.untyped_storage().nbytes()
        return tensor


@final
@dataclass(frozen=True)
class LayerTimes:
    forward_ms: float
    backward_ms: float


@final
@dataclass(frozen=True)
class LayerProfile:
    facts: LayerFacts
    forward_ms: float
    backward_ms: float

    @property
    def ms(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_ms + self.backward_ms


@final
@dataclass(frozen=True)
class Sample:
    """One micro-batch to measure with; a loss counts as part of the last layer, as in a pipeline."""

    input: Value
    target: Tensor | None = None
    loss: LossFunction | None = None

    def to(self, device: torch.device) -> Sample:
        target = None if self.target is None else self.target.to(device)
        return Sample(moved(self.input, device), target, self.loss)


IsLate = Callable[[], bool]
"""Whether the time to measure is up; a measurement then ends with the fewest runs that give a number."""


def never_late() -> bool:
    return False


def profile_layers(
    module: nn.Sequential,
    sample: Sample,
    *,
    seconds: float = 1.0,
    repeats: int = 5,
    most_repeats: int = MOST_REPEATS,
) -> list[LayerProfile]:
    """Medians of at least `repeats` runs, and of up to `most_repeats` while `seconds` last."""
    with _layer_by_layer(module, sample) as pipe:
        # In a step of its own: the hooks would add to the times.
        saved = _saved_tensors(pipe, sample)
    times = layer_times(module, sample, seconds=seconds, repeats=repeats, most_repeats=most_repeats)
    return [
        LayerProfile(own_saved.facts(index, name, layer), own.forward_ms, own.backward_ms)
        for index, (own_saved, own, name, layer) in enumerate(
            zip(saved, times, layer_names(module), module, strict=True)
        )
    ]


def layer_times(
    module: nn.Sequential,
    sample: Sample,
    *,
    seconds: float = 1.0,
    repeats: int = 5,
    most_repeats: int = MOST_REPEATS,
    is_late: IsLate = never_late,
) -> list[LayerTimes]:
    """The times alone."""
    with _layer_by_layer(module, sample) as pipe:
        times = _measure(pipe, sample, seconds, repeats, most_repeats, is_late)
    frozen = frozen_layers(module, sample)
    # Medians, because a burst of other work on the machine disturbs some runs, not half of them.
    return [
        LayerTimes(
            1000 * statistics.median(times[index, "forward"]),
            # A layer without a backward still has the action, which takes a moment to do nothing.
            0.0 if index < frozen else 1000 * statistics.median(times[index, "backward"]),
        )
        for index in range(len(module))
    ]


def has_values(module: nn.Module) -> bool:
    """Whether the module can run: no parameter was built without storage."""
    return not any(parameter.is_meta for parameter in module.parameters())


def forward_times(module: nn.Sequential, sample: Sample, runs: int) -> list[list[float]]:
    """Milliseconds of every layer's forward in each run, without the loss; far quicker than a profile."""
    with _layer_by_layer(module, sample) as pipe:
        _forward(pipe, sample)
        with recording(pipe) as record:
            for _ in range(runs):
                _forward(pipe, sample)
    times: list[list[float]] = [[] for _ in module]
    for piece in record.pieces():
        if piece.phase == "forward":
            times[piece.action.partition].append(1000 * (piece.end - piece.begin))
    return [list(run) for run in zip(*times, strict=True)]


def frozen_layers(module: nn.Sequential, sample: Sample | None = None) -> int:
    """How many layers come before the first with a trained parameter: backward ends before it reaches them.

    sample: an input that may need a gradient itself; those of a training run never do.
    """
    if sample is not None and any(tensor.requires_grad for tensor in tensors_of(sample.input)):
        return 0
    trained = (any(parameter.requires_grad for parameter in layer.parameters()) for layer in module)
    return next((index for index, is_trained in enumerate(trained) if is_trained), len(module))


@contextmanager
def preserved(module: nn.Module, *, device: bool = False) -> Iterator[None]:
    """Train mode inside; afterwards modes and buffers are restored, and gradients, of which there may be none, removed.

    device: also move the module back to the device it was on, for a pipe moves its layers to its own devices.
    """
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient")
    home = next((parameter.device for parameter in module.parameters()), None)
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    buffers = BufferState(buffer_owners(modules_of([module])))
    module.train()
    try:
        yield
    finally:
        buffers.restore()
        for parameter in module.parameters():
            parameter.grad = None
        for submodule, training in modes:
            submodule.training = training
        if device and home is not None:
            module.to(home)


@contextmanager
def _layer_by_layer(module: nn.Sequential, sample: Sample) -> Iterator[PlainPipe]:
    """A pipe in which each layer is a partition."""
    if not has_values(module):
        raise ConfigError("a model without storage cannot be run, so its layers cannot be measured")
    device = tensors_of(sample.input)[0].device
    with preserved(module, device=True):
        move_to_devices([module], [device])
        with PlainPipe(module, [1] * len(module), device=device) as pipe:
            yield pipe


def _forward(pipe: PlainPipe, sample: Sample) -> Any:
    # The pipe draws its key from torch's default generator, which must be left where it was.
    with torch.random.fork_rng(devices=[]):
        return pipe(sample.input)


def _step(pipe: PlainPipe, sample: Sample) -> None:
    if sample.loss is not None and sample.target is not None:
        pipe.step(sample.input, sample.target, sample.loss, key=0)
        return
    roots = [tensor for tensor in tensors_of(_forward(pipe, sample)) if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _measure(
    pipe: PlainPipe, sample: Sample, seconds: float, repeats: int, most_repeats: int, is_late: IsLate
) -> dict[tuple[int, str], list[float]]:
    """Seconds of every run, by layer and phase."""
    # The first steps also pay for new threads and their memory.
    for warmed_up in range(WARM_UP):
        if not (warmed_up and is_late()):
            _step(pipe, sample)
    with recording(pipe) as record:
        deadline = time.perf_counter() + seconds
        for run in range(max(repeats, most_repeats)):
            if run and (is_late() or (run >= repeats and time.perf_counter() > deadline)):
                break
            _step(pipe, sample)
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for piece in record.pieces():
        times[piece.action.partition, piece.phase].append(piece.end - piece.begin)
    return times


def _saved_tensors(pipe: PlainPipe, sample: Sample) -> list[SavedTensors]:
    """Run one step with hooks on every layer."""

    def before(saved: SavedTensors, layer: nn.Module, inputs: Any) -> None:
        saved.__enter__()

    def after(saved: SavedTensors, layer: nn.Module, inputs: Any, output: Any) -> None:
        saved.__exit__(None, None, None)
        saved.note_output(output)

    parameters = {storage_of(parameter) for parameter in pipe.parameters()}
    by_layer = [SavedTensors(parameters) for _ in pipe]
    handles = []
    for saved, layer in zip(by_layer, pipe, strict=True):
        handles.append(layer.register_forward_pre_hook(partial(before, saved)))
        handles.append(layer.register_forward_hook(partial(after, saved)))
    try:
        _step(pipe, replace(sample, loss=sample.loss and by_layer[-1].including(sample.loss)))
    finally:
        for handle in handles:
            handle.remove()
        for saved in by_layer:
            saved.leave_failed_layer()
    return by_layer
