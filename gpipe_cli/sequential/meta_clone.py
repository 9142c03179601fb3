"""Copies of a model without storage, to trace or try out while the model itself stays untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn


def meta_clone(model: nn.Module) -> nn.Module:
    """Copy a model with its parameters and buffers on the meta device."""
    return clone_with(model, meta_like)


def clone_with(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a model with `replace(tensor)` for each parameter and buffer; tensors that are shared stay shared.

    Tensors in plain attributes are not copied, because a forward may compute constants from their values. The
    exception are meta tensors, which have no values.
    """
    plain = [
        value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)
    ]
    # deepcopy takes what the memo holds for an object's id instead of copying that object.
    memo: dict[int, object] = {id(value): value for value in plain}
    for tensor in chain(model.parameters(), model.buffers(), (value for value in plain if value.is_meta)):
        memo[id(tensor)] = replace(tensor)
    return copy.deepcopy(model, memo)


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor, or parameter, of the same shape and dtype on the meta device."""
    meta = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def placeholder(shape: Sequence[int], dtype: torch.dtype, value: float = 0) -> Tensor:
    """A tensor of this shape that takes the memory of a single number: every element is `value`."""
    return torch.full((), value, dtype=dtype).expand(tuple(shape))
