"""Tensors that share memory and cross a boundary together.

Where layers of one partition would see a write through an alias, layers on both sides of a boundary must see it too,
with its gradient. So of tensors that overlap in memory only one crosses; the others are made from it again on the
other side. Decides which, and how; knows nothing of partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from gpipe_cli.torch_internals.storage import storage_of

__all__ = ["Alias", "find_aliases", "is_dense"]


@final
@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor that is made from another one, the one at place `of`."""

    of: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From the first element of the other one."""
    detached: bool
    """Whether it takes no part in the gradient of the other one."""

    def made_from(self, other: Tensor) -> Tensor:
        source = other.detach() if self.detached else other
        if self.offset == 0 and self.size == source.shape and self.stride == source.stride():
            return source if self.detached else source.view_as(source)
        return source.as_strided(self.size, self.stride, source.storage_offset() + self.offset)


def find_aliases(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], dict[int, Alias]]:
    """Of tensors that cross together, who is made from whom, and the bases that cross for that besides.

    The bases' places follow those of `tensors`. Tensors that overlap nothing stay as they are.
    """
    bases: list[Tensor] = []
    aliases: dict[int, Alias] = {}
    by_memory: dict[int, dict[int, Tensor]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            by_memory.setdefault(storage_of(tensor), {})[place] = tensor
    for members in by_memory.values():
        base = _base(list(members.values())) if len(members) > 1 else None
        if base is None:
            continue
        base_place = next((place for place, tensor in members.items() if tensor is base), None)
        if base_place is None:
            base_place = len(tensors) + len(bases)
            bases.append(base)
        for place, tensor in members.items():
            if place != base_place:
                aliases[place] = _alias(base_place, base, tensor)
    return bases, aliases


def _base(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor that all of them can be made from; None if they do not overlap, or cannot."""
    if not any(_overlap(first, second) for index, first in enumerate(tensors) for second in tensors[:index]):
        return None
    # Autograd knows one base for all views of it; among tensors that are no views of each other the first will do.
    base = next((tensor._base for tensor in tensors if tensor._base is not None), tensors[0])
    same_dtype = all(tensor.dtype == base.dtype for tensor in tensors)
    return base if same_dtype and is_dense(base) else None


def _alias(place: int, base: Tensor, tensor: Tensor) -> Alias:
    return Alias(
        place,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset() - base.storage_offset()),
        base.requires_grad and not tensor.requires_grad,
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory in some order of the dimensions: then a copy has the same strides."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _overlap(first: Tensor, second: Tensor) -> bool:
    """False only if it is certain: slices of one tensor along any of its dimensions are told apart."""
    if first.numel() == 0 or second.numel() == 0:
        return False
    if first.stride() != second.stride():
        return True
    order = sorted(
        (place for place, stride in enumerate(first.stride()) if stride), key=first.stride().__getitem__
    )
    if not order or any(first.stride(place) % first.stride(order[0]) for place in order):
        return first.storage_offset() == second.storage_offset() if not order else True
    intervals = [_intervals(tensor, order[::-1]) for tensor in (first, second)]
    if None in intervals:
        return True
    return all(
        begin < other_end and other_begin < end
        for (begin, end), (other_begin, other_end) in zip(*intervals, strict=True)
    )


def _intervals(tensor: Tensor, order: Sequence[int]) -> list[tuple[int, int]] | None:
    """For each dimension, largest stride first, the indices that a slice has in the tensor it was cut from.

    Last comes the offset within the smallest stride. None if a row of the slice runs into the next row.
    """
    found = []
    rest, limit = int(tensor.storage_offset()), None
    for place in order:
        index, rest = divmod(rest, tensor.stride(place))
        end = index + tensor.size(place)
        if limit is not None and end * tensor.stride(place) > limit:
            return None
        found.append((index, end))
        limit = tensor.stride(place)
    return [*found, (rest, rest + 1)]
