"""Models built without storage, so that one larger than memory can be looked at.

    with without_storage():
        model = build()

Decides what gets memory all the same: small tensors, because constructors compute with them (widths, ratios of
dropout), which tensors without values do not allow. Knows nothing of what is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["without_storage"]

_SMALL = 2**16
"""Elements. Nobody computes a width from more of them, and no model has so many tensors below it as to matter."""

_MAKERS = frozenset(
    {
        torch.arange,
        torch.empty,
        torch.empty_strided,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.logspace,
        torch.ones,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.zeros,
    }
)
"""What makes a tensor of nothing but numbers."""

_FILLERS = frozenset(
    {
        Tensor.bernoulli_,
        Tensor.exponential_,
        Tensor.fill_,
        Tensor.normal_,
        Tensor.random_,
        Tensor.uniform_,
        Tensor.zero_,
        nn.init.constant_,
        nn.init.kaiming_normal_,
        nn.init.kaiming_uniform_,
        nn.init.normal_,
        nn.init.uniform_,
    }
)
"""What gives a tensor new values: nothing to do where there are none, and torch would import its compiler for it."""


def without_storage() -> TorchFunctionMode:
    """Inside, large tensors are made on the meta device, whatever device is asked for."""
    return _WithoutStorage()


@final
class _WithoutStorage(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        # With types there are arguments of torch.fx among them, which have no size yet.
        if func in _MAKERS and not types:
            # A generator belongs to a device, and numbers that are not drawn need none.
            drawn = {name: value for name, value in named.items() if name not in ("generator", "pin_memory")}
            tensor: Tensor = func(*args, **{**drawn, "device": "meta"})
            if tensor.numel() > _SMALL:
                return tensor
        filled = args[0] if args else named.get("tensor")
        if func in _FILLERS and isinstance(filled, Tensor) and filled.is_meta:
            return filled
        return func(*args, **named)
