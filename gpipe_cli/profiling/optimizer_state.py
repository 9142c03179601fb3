"""What an optimizer will keep per parameter, and how many bytes that is, found by trying it on a tiny parameter.

No optimizer is known by name: each makes one update of a parameter with a few elements, and the shapes of its state
then tell how the state grows. Momenta have the parameter's shape, Adafactor's rows and columns a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.torch_internals.without_compiler import without_compiler

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

_SIDES = (2, 3, 5, 7, 11, 13, 17, 19)
"""The shape of a tiny parameter: different primes, so that each side of a state tensor can be told apart."""


@final
@dataclass(frozen=True)
class _StateTensor:
    """Which sides of the parameter a state tensor has, and how many bytes the rest of it multiplies them by."""

    sides: tuple[int, ...]
    rest: int

    def bytes(self, shape: Sequence[int]) -> int:
        return self.rest * prod(shape[side] for side in self.sides)


def state_bytes(make: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> list[int]:
    """For each parameter what the optimizer keeps after an update; nothing for a frozen one."""

    @cache
    def state_tensors(dimensions: int, dtype: torch.dtype) -> list[_StateTensor]:
        state = _state_after_a_step(make, dimensions, dtype)
        return [_describe(value, dimensions) for value in state.values() if isinstance(value, Tensor)]

    return [
        sum(tensor.bytes(parameter.shape) for tensor in state_tensors(parameter.dim(), parameter.dtype))
        if parameter.requires_grad
        else 0
        for parameter in parameters
    ]


@final
class OptimizerStateShapes:
    """What an optimizer keeps for a parameter from its first update on: names, shapes, dtypes."""

    def __init__(self, make: MakeOptimizer) -> None:
        self._make = make
        self._states: dict[tuple[int, torch.dtype], dict[str, Any] | None] = {}

    def of(self, parameter: Tensor) -> dict[str, Any] | None:
        """Tensors on the meta device, and numbers; None for an optimizer that cannot be tried out this way."""
        key = parameter.dim(), parameter.dtype
        if key not in self._states:
            try:
                self._states[key] = _state_after_a_step(self._make, *key)
            except Exception:  # noqa: BLE001 - it may need other gradients than these; training itself will tell
                self._states[key] = None
        state = self._states[key]
        if state is None:
            return None
        return {name: _scaled(value, parameter.shape) for name, value in state.items()}


def _scaled(value: Any, shape: Sequence[int]) -> Any:
    """The state of the tiny parameter as it is for a parameter of this shape."""
    if not isinstance(value, Tensor):
        return value
    sides = _SIDES[: len(shape)]
    # An optimizer that flattens its parameter keeps a row of as many elements.
    if value.dim() == 1 and len(shape) > 1 and value.numel() == prod(sides):
        return value.new_empty(prod(shape), device="meta")
    return value.new_empty(
        [shape[sides.index(side)] if side in sides else side for side in value.shape], device="meta"
    )


def _state_after_a_step(make: MakeOptimizer, dimensions: int, dtype: torch.dtype) -> dict[str, Any]:
    tiny = nn.Parameter(torch.ones(_SIDES[:dimensions], dtype=dtype))
    # Optimizers create their state in the first update, and only for parameters with a gradient.
    tiny.grad = torch.ones_like(tiny)
    with without_compiler():
        optimizer = make([tiny])
        optimizer.step()
    return dict(optimizer.state[tiny])


def _describe(value: Tensor, dimensions: int) -> _StateTensor:
    sides = _SIDES[:dimensions]
    if value.numel() == prod(sides):  # of the same size, perhaps of another shape
        return _StateTensor(tuple(range(dimensions)), value.element_size())
    rest = prod(side for side in value.shape if side not in sides)
    return _StateTensor(
        tuple(sides.index(side) for side in value.shape if side in sides), rest * value.element_size()
    )
