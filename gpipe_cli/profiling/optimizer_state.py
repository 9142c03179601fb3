"""What an optimizer will keep per parameter, and how many bytes that is, found out with parameters of a few numbers.

Every optimizer is asked, none is known by name: it makes one update of a tiny parameter, and the shapes of what it
keeps then say how that grows. Momenta have the parameter's shape, Adafactor's rows and columns a part of it.
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
"""The shape of a tiny parameter: different primes, so that a side of a kept tensor says which one it is."""


@final
@dataclass(frozen=True)
class _Kept:
    """A tensor of the optimizer's: which sides of the parameter it has, and how large the rest of it is."""

    sides: tuple[int, ...]
    rest: int

    def bytes(self, shape: Sequence[int]) -> int:
        return self.rest * prod(shape[side] for side in self.sides)


def state_bytes(make: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> list[int]:
    """For each parameter what the optimizer keeps once it has made an update; none for a frozen one."""

    @cache
    def kept(dimensions: int, dtype: torch.dtype) -> list[_Kept]:
        return _try_out(make, dimensions, dtype)

    return [
        sum(one.bytes(parameter.shape) for one in kept(parameter.dim(), parameter.dtype))
        if parameter.requires_grad
        else 0
        for parameter in parameters
    ]


@final
class OptimizerStateShapes:
    """What an optimizer keeps of a parameter from its first update on: names, shapes, dtypes."""

    def __init__(self, make: MakeOptimizer) -> None:
        self._make = make
        self._kept: dict[tuple[int, torch.dtype], dict[str, Any] | None] = {}

    def of(self, parameter: Tensor) -> dict[str, Any] | None:
        """Tensors without numbers, and numbers; None for an optimizer that cannot be tried out like that."""
        key = parameter.dim(), parameter.dtype
        if key not in self._kept:
            try:
                self._kept[key] = _state_after_a_step(self._make, *key)
            except Exception:  # noqa: BLE001 - it may want other gradients than these; training itself will tell
                self._kept[key] = None
        kept = self._kept[key]
        return None if kept is None else {name: _scaled(one, parameter.shape) for name, one in kept.items()}


def _scaled(kept: Any, shape: Sequence[int]) -> Any:
    """What was kept of the tiny parameter, as it is for one of that shape."""
    if not isinstance(kept, Tensor):
        return kept
    sides = _SIDES[: len(shape)]
    if kept.dim() == 1 and len(shape) > 1 and kept.numel() == prod(sides):
        return kept.new_empty(prod(shape), device="meta")
    return kept.new_empty(
        [shape[sides.index(side)] if side in sides else side for side in kept.shape], device="meta"
    )


def _try_out(make: MakeOptimizer, dimensions: int, dtype: torch.dtype) -> list[_Kept]:
    kept = _state_after_a_step(make, dimensions, dtype)
    return [_describe(one, dimensions) for one in kept.values() if isinstance(one, Tensor)]


def _state_after_a_step(make: MakeOptimizer, dimensions: int, dtype: torch.dtype) -> dict[str, Any]:
    tiny = nn.Parameter(torch.ones(_SIDES[:dimensions], dtype=dtype))
    tiny.grad = torch.ones_like(tiny)
    with without_compiler():
        optimizer = make([tiny])
        optimizer.step()
    return dict(optimizer.state[tiny])


def _describe(kept: Tensor, dimensions: int) -> _Kept:
    sides = _SIDES[:dimensions]
    if kept.numel() == prod(sides):  # of the same size, if perhaps of another shape
        return _Kept(tuple(range(dimensions)), kept.element_size())
    found = tuple(sides.index(side) for side in kept.shape if side in sides)
    rest = prod(side for side in kept.shape if side not in sides)
    return _Kept(found, rest * kept.element_size())
