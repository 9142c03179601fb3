"""A slice: the parameters of consecutive layers, what their optimizer keeps, and at times their gradients.

Each of these parts lies on a shelf and is brought into memory on the device as a whole. Layers and optimizer see
views of that memory while it is there. Buffers are no part of it: layers may write them at any time, and they are
small. Decides what belongs together; knows nothing of when it is moved.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.offload.shelf import Shelf
from gpipe_cli.offload.tiers import Tier

__all__ = ["Part", "Slice"]


@final
class Part(enum.Enum):
    WEIGHTS = "weights"
    STATE = "state"
    """What the optimizer keeps, from its first update on; numbers without a dimension stay where they are."""
    GRADIENTS = "gradients"
    """Where they cannot be used at once."""


@final
class Slice:
    def __init__(
        self,
        tier: Tier,
        parameters: Sequence[nn.Parameter],
        value_of: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """value_of: gives the numbers of a parameter that has none itself."""
        self.parameters = list(parameters)
        self.trained = [one for one in self.parameters if one.requires_grad]
        self.optimizer: torch.optim.Optimizer | None = None
        """To be set by whoever trains."""
        self._tier = tier
        self._shelves = {Part.WEIGHTS: Shelf(tier, [one.data for one in self.parameters])}
        self._kept: list[tuple[nn.Parameter, str]] = []
        self._with_gradient: set[nn.Parameter] = set()
        for index, parameter in enumerate(self.parameters):
            self._shelves[Part.WEIGHTS].put(index, value_of(parameter.data))
            parameter.data = self._shelves[Part.WEIGHTS].homes[index]

    def shelf(self, part: Part) -> Shelf | None:
        """None where there is nothing of that part yet."""
        return self._shelves.get(part)

    @property
    def shelves(self) -> list[Shelf]:
        return list(self._shelves.values())

    def attach(self, part: Part, memory: Tensor) -> None:
        """Let layers and optimizer see what has been brought into `memory`."""
        self._assign(part, self._shelves[part].views(memory))

    def detach(self) -> None:
        """Let nobody see memory that will be reused; gradients are not missed, their homes are never looked at."""
        for part in (Part.WEIGHTS, Part.STATE):
            if part in self._shelves:
                self._assign(part, self._shelves[part].homes)

    def _assign(self, part: Part, tensors: Sequence[Tensor]) -> None:
        if part is Part.WEIGHTS:
            for parameter, tensor in zip(self.parameters, tensors, strict=True):
                parameter.data = tensor
        elif part is Part.STATE:
            for (parameter, key), tensor in zip(self._kept, tensors, strict=True):
                assert self.optimizer is not None, "what is kept is an optimizer's"
                self.optimizer.state[parameter][key] = tensor
        else:
            for parameter, tensor in zip(self.trained, tensors, strict=True):
                parameter.grad = tensor if parameter in self._with_gradient else None

    def gather(self, part: Part, memory: Callable[[Part, int], Tensor]) -> None:
        """Bring into `memory` of the size asked for what was made elsewhere since the part was attached."""
        if part is Part.STATE:
            self._kept, tensors = self._kept_now()
        elif part is Part.GRADIENTS:
            self._with_gradient = {one for one in self.trained if one.grad is not None}
            tensors = [one.data if one.grad is None else one.grad for one in self.trained]
        else:
            return
        shelf = self._shelves.get(part)
        if shelf is None or not _fits(shelf, tensors):
            shelf = self._shelves[part] = Shelf(self._tier, tensors)
        for view, tensor in zip(shelf.views(memory(part, shelf.layout.nbytes)), tensors, strict=True):
            if view.data_ptr() != tensor.data_ptr():
                view.copy_(tensor)
        if part is Part.GRADIENTS:
            for parameter in self.trained:
                parameter.grad = None

    def _kept_now(self) -> tuple[list[tuple[nn.Parameter, str]], list[Tensor]]:
        state: dict[Any, dict[str, Any]] = {} if self.optimizer is None else self.optimizer.state
        found = {
            (parameter, key): value
            for parameter in self.trained
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim() > 0
        }
        return list(found), list(found.values())


def _fits(shelf: Shelf, tensors: Sequence[Tensor]) -> bool:
    places = shelf.layout.places
    return [(place.dtype, place.size) for place in places] == [
        (tensor.dtype, tuple(tensor.shape)) for tensor in tensors
    ]
