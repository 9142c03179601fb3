"""Counts the floating-point operations of attention on the CPU, whose kernels are private; torch counts only CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Shape = tuple[int, ...]


def _forward(query: Shape, key: Shape, value: Shape, *rest: object, **options: object) -> int:
    """The scores, then their product with the values: two matrix multiplications."""
    return _pair(query, key) * (query[-1] + value[-1])


def _backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *rest: object, **options: object
) -> int:
    """The scores again, then the gradients of scores, values, queries and keys."""
    return _pair(query, key) * (3 * query[-1] + 2 * value[-1])


def _pair(query: Shape, key: Shape) -> int:
    """A multiplication and an addition for each pair of query and key, per element of a row."""
    batch, heads, queries, _ = query
    return 2 * batch * heads * queries * key[-2]


ATTENTION_ON_CPU: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
"""For `FlopCounterMode(custom_mapping=...)`."""
