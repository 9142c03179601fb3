"""Mini-batches into micro-batches and back.

Decides what may enter and leave a pipe (a Tensor or a flat tuple of Tensors that agree on their batch
size), how it is split on dimension 0, and how outputs are joined. Knows nothing of partitions or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gpipe_cli.pipeline.context import MicroBatch

__all__ = [
    "Value",
    "batch_size",
    "check",
    "detached",
    "gather",
    "micro_batches",
    "moved",
    "scatter",
    "tensors_of",
    "value_like",
]

Value: TypeAlias = Tensor | tuple[Tensor, ...]


def check(value: object) -> Value:
    """`value` itself if a pipe can carry it, a TypeError otherwise."""
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, Tensor):
            raise TypeError(f"expected Tensor, but got {type(item).__name__}")
    return value  # type: ignore[return-value]  # the loop above has just proved it


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def value_like(model: Value, tensors: tuple[Tensor, ...]) -> Value:
    """`tensors` in the form of `model`: a tuple stays one even with a single member."""
    return tensors if isinstance(model, tuple) else tensors[0]


def detached(value: Value) -> Value:
    return value_like(value, tuple(tensor.detach() for tensor in tensors_of(value)))


def moved(value: Value, device: torch.device) -> Value:
    return value_like(value, tuple(tensor.to(device) for tensor in tensors_of(value)))


def batch_size(value: Value, what: str = "input") -> int:
    """The rows of `value`; a ValueError where its tensors disagree or have none to split."""
    sizes = []
    for tensor in tensors_of(value):
        if tensor.dim() == 0:
            raise ValueError(
                f"the {what} has a tensor without dimensions, which cannot be split into micro-batches"
            )
        sizes.append(tensor.size(0))
    if not sizes:
        raise ValueError(f"the {what} is an empty tuple: there is nothing to split")
    if len(set(sizes)) > 1:
        raise ValueError(f"tensors of the {what} must agree on the batch size (sizes: {sizes})")
    return sizes[0]


def micro_batches(rows: int, chunks: int) -> tuple[MicroBatch, ...]:
    """min(rows, chunks) micro-batches whose sizes differ by at most one; an empty batch is one empty
    micro-batch.
    """
    count = max(1, min(rows, chunks))
    small, larger = divmod(rows, count)
    return tuple(MicroBatch(index, small + (index < larger)) for index in range(count))


def scatter(value: Value, count: int) -> list[Value]:
    """`value` in `count` slices of the sizes that `micro_batches` gives; no row is lost, none is copied."""
    if count == 1:
        return [value]
    if isinstance(value, Tensor):
        return list(value.tensor_split(count))
    return list(zip(*(tensor.tensor_split(count) for tensor in value), strict=True))


def gather(outputs: Sequence[Value]) -> Value:
    """The outputs of all micro-batches as one value."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    columns = zip(*(tensors_of(output) for output in outputs), strict=True)
    return value_like(first, tuple(_join(column) for column in columns))


def _join(column: tuple[Tensor, ...]) -> Tensor:
    if column[0].dim() == 0:
        raise RuntimeError(
            f"cannot concatenate the outputs of {len(column)} micro-batches: they have no batch dimension. "
            "Return one row per sample, or let pipe.step(input, target, loss_fn) compute the loss."
        )
    return torch.cat(column)
