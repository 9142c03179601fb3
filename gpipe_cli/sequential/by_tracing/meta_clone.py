"""A copy of a model without storage, to be traced and tried out while the model itself stays untouched."""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import Tensor, nn

__all__ = ["meta_clone", "meta_twin"]


def meta_clone(model: nn.Module) -> nn.Module:
    """Parameters and buffers are on the meta device; other tensors are the model's own.

    Those others are plain attributes, and what a forward computes from them is worth keeping.
    """
    own = (value for module in model.modules() for value in vars(module).values())
    memo: dict[int, object] = {id(value): value for value in own if isinstance(value, Tensor)}
    for tensor in chain(model.parameters(), model.buffers()):
        memo[id(tensor)] = meta_twin(tensor)
    return copy.deepcopy(model, memo)


def meta_twin(tensor: Tensor) -> Tensor:
    twin = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
