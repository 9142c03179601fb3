"""What is seen of one layer when a micro-batch passes: what it gives, and what it keeps for backward.

The tensors may be real or fake. Decides that parameters do not count as kept, and that a storage counts once
however many of its views are kept. Knows nothing of how the layer is run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, final

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.torch_internals.storage import storage_of

__all__ = ["LayerFacts", "Seen"]

Shape = tuple[int, ...]


@final
@dataclass(frozen=True)
class LayerFacts:
    """What can be said of a layer without a clock."""

    index: int
    name: str
    type: str
    parameters: int
    parameter_bytes: int
    saved_bytes: int
    """Kept for backward of one micro-batch, parameters excepted, each storage counted once."""
    output_shape: tuple[Shape, ...]
    """One shape per tensor, skips left out."""
    output_bytes: int


@final
class Seen:
    """A context manager to run a layer in. It may be entered more than once: a loss belongs to the last layer."""

    def __init__(self, parameters: Collection[int]) -> None:
        """`parameters` are the storages that do not count."""
        self._parameters = parameters
        self._hooks: list[saved_tensors_hooks] = []
        self.storages: dict[int, int] = {}
        """What was kept: bytes by storage."""
        self.output_shape: tuple[Shape, ...] = ()
        self.output_bytes = 0

    def __enter__(self) -> Self:
        hooks = saved_tensors_hooks(self._keep, lambda kept: kept)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.pop().__exit__(kind, error, trace)

    def look_at(self, output: Any) -> None:
        # A value of any other kind is refused by whoever runs the layer.
        tensors = [one for one in tensors_of(output) if isinstance(one, Tensor)]
        self.output_shape = tuple(tuple(one.shape) for one in tensors)
        self.output_bytes = sum(one.nbytes for one in tensors)

    def watching(self, loss: LossFunction) -> LossFunction:
        """The loss, with what it keeps counted as this layer's."""

        def watched(output: Any, target: Any) -> Tensor:
            with self:
                return loss(output, target)

        return watched

    def facts(self, index: int, name: str, layer: nn.Module) -> LayerFacts:
        return LayerFacts(
            index=index,
            name=name,
            type=type(layer).__name__,
            parameters=sum(one.numel() for one in layer.parameters()),
            parameter_bytes=sum(one.nbytes for one in layer.parameters()),
            saved_bytes=sum(self.storages.values()),
            output_shape=self.output_shape,
            output_bytes=self.output_bytes,
        )

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = storage_of(tensor)
        if storage not in self._parameters:
            self.storages[storage] = tensor.untyped_storage().nbytes()
        return tensor
