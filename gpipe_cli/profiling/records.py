"""What is known of the layers of a model: a sample to find it out with, and the records of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import Value, moved, tensors_of
from gpipe_cli.pipeline.module_state import BufferState, buffer_owners, modules_of
from gpipe_cli.sequential import layer_class
from gpipe_cli.torch_internals.tensors import storage_of

Shape = tuple[int, ...]
MEASURED, FORWARD, FLOPS, LAYERS = "measured", "forward measured", "FLOPs", "layers"
"""Where the times of a layer come from."""


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


@final
@dataclass(frozen=True)
class LayerStats:
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
@dataclass(frozen=True)
class LayerMemory:
    """The bytes of a layer and one micro-batch. The keys of mappings identify what layers may share."""

    resident: Mapping[int, int]
    """Parameters with their gradients and the optimizer's state, buffers."""
    input: int
    """What enters the layer from the previous one."""
    saved: Mapping[int, int]
    """Saved for backward."""


@final
@dataclass(frozen=True)
class SkipStats:
    """A tensor that layer `begin` stashes and layer `end` pops."""

    begin: int
    end: int
    shape: Shape
    bytes: int


@final
@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of one micro-batch."""

    forward_ms: float
    backward_ms: float
    source: str = MEASURED
    """MEASURED, or FORWARD: only that; FLOPS or LAYERS: estimated from FLOPs, or taken as equal to all others."""

    @property
    def is_work(self) -> bool:
        """Whether nothing of it was measured."""
        return self.source in (FLOPS, LAYERS)


@final
class WatchedLayer:
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

    def with_storages(self, storages: dict[int, int]) -> WatchedLayer:
        """A copy for another layer, whose storages are others."""
        other = WatchedLayer(self._parameters)
        other.storages = storages
        other.output_shape, other.output_bytes = self.output_shape, self.output_bytes
        return other

    def stats(self, index: int, name: str, layer: nn.Module) -> LayerStats:
        return LayerStats(
            index=index,
            name=name,
            type=layer_class(layer),
            parameters=parameter_count(layer),
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


def parameter_count(layer: nn.Module) -> int:
    """How many numbers its parameters are. A module whose parameter packs several into a byte has `count_packed`."""
    counts = {
        parameter: getattr(part, "count_packed", Tensor.numel)(parameter)
        for part in layer.modules()
        for parameter in part.parameters(recurse=False)
    }
    return sum(counts.values())


def has_values(module: nn.Module) -> bool:
    """Whether the module can run: no parameter was built without storage."""
    return not any(parameter.is_meta for parameter in module.parameters())


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
