"""A copy of a model without storage, to be traced and tried out while the model itself stays untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

__all__ = ["clone_with", "meta_clone", "meta_twin"]


def meta_clone(model: nn.Module) -> nn.Module:
    """Parameters and buffers are on the meta device; other tensors are the model's own.

    Those others are plain attributes, and what a forward computes from them is worth keeping.
    """
    return clone_with(model, meta_twin)


def clone_with(model: nn.Module, twin: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy with the `twin` of each parameter and buffer, one for all places that share it.

    Plain attributes stay the model's own, unless they have no values either.
    """
    own = [
        value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)
    ]
    memo: dict[int, object] = {id(value): value for value in own}
    for tensor in chain(model.parameters(), model.buffers(), (value for value in own if value.is_meta)):
        memo[id(tensor)] = twin(tensor)
    return copy.deepcopy(model, memo)


def meta_twin(tensor: Tensor) -> Tensor:
    twin = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
