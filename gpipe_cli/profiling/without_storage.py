"""Builds models without storage, so that you can examine one that is larger than memory.

    with without_storage():
        model = build()

Small tensors do get memory: constructors compute with them (widths, dropout ratios), which needs values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SMALL = 2**16
"""Elements. Constructors compute nothing from larger tensors, and the smaller ones of a model take little memory."""

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
"""Functions that make a tensor from numbers alone."""

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
"""Functions that give a tensor new values: skipped for a tensor without any, since torch would import its compiler."""


def without_storage() -> TorchFunctionMode:
    """Inside, large tensors are on the meta device, whatever device they are made for."""
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
        # With types some arguments are torch.fx proxies, which have no size yet.
        if func in _MAKERS and not types:
            # A generator belongs to a device, and nothing is drawn on the meta device.
            drawn = {name: value for name, value in named.items() if name not in ("generator", "pin_memory")}
            tensor: Tensor = func(*args, **{**drawn, "device": "meta"})
            if tensor.numel() > _SMALL:
                return tensor
        filled = args[0] if args else named.get("tensor")
        if func in _FILLERS and isinstance(filled, Tensor) and filled.is_meta:
            return filled
        return func(*args, **named)
