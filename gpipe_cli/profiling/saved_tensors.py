"""What one layer outputs, and what autograd saves for its backward, when a micro-batch passes; tensors may be fake."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, final

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.torch_internals.tensor_memory import storage_of

Shape = tuple[int, ...]


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

    def facts(self, index: int, name: str, layer: nn.Module) -> LayerFacts:
        return LayerFacts(
            index=index,
            name=name,
            type=type(layer).__name__,
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
