"""Where tensors lie in memory: which share it and cross a boundary together, and copies that keep an alignment.

Within one partition, layers see a write through an alias, with its gradient. Layers on both sides of a boundary must
see it too. So of tensors that overlap in memory only one crosses, and the receiver builds the others from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gpipe_cli.torch_internals.tensor_memory import storage_of

ALIGNMENT = 64
"""Bytes. torch allocates memory at multiples of it; for a tensor that begins elsewhere, kernels use other vector
instructions at its edges, and give other bits."""


@final
@dataclass(frozen=True, slots=True)
class Alias:
    """How to build a tensor from the one at place `of`."""

    of: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From the first element of that tensor."""
    detached: bool
    """Whether its gradient does not flow to that tensor."""

    def build(self, base: Tensor) -> Tensor:
        source = base.detach() if self.detached else base
        if self.offset == 0 and self.size == source.shape and self.stride == source.stride():
            return source if self.detached else source.view_as(source)
        return source.as_strided(self.size, self.stride, source.storage_offset() + self.offset)


def find_aliases(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], dict[int, Alias]]:
    """Which of the tensors to build from which, and the bases that have to cross as well for that.

    The places of the bases follow those of `tensors`. A tensor that overlaps no other crosses as it is.
    """
    bases: list[Tensor] = []
    aliases: dict[int, Alias] = {}
    by_memory: dict[int, dict[int, Tensor]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            by_memory.setdefault(storage_of(tensor), {})[place] = tensor
    for members in by_memory.values():
        for group in _overlapping(members):
            base = _base(list(group.values()))
            if base is None:
                continue
            base_place = next((place for place, tensor in group.items() if tensor is base), None)
            if base_place is None:
                base_place = len(tensors) + len(bases)
                bases.append(base)
            for place, tensor in group.items():
                if place != base_place:
                    aliases[place] = _alias(base_place, base, tensor)
    return bases, aliases


def _overlapping(members: dict[int, Tensor]) -> list[dict[int, Tensor]]:
    """Group the tensors of one storage that overlap. A slice that is disjoint from all others is in no group."""
    groups: list[dict[int, Tensor]] = []
    if len(members) == 1:
        return groups
    for place, tensor in members.items():
        group = {place: tensor}
        for other in groups.copy():
            if any(_overlap(tensor, member) for member in other.values()):
                groups.remove(other)
                group = other | group
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def _base(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor from which all of them can be built, or None."""
    # Autograd knows one base for all views of it. Tensors that are no views of each other are built from the largest.
    views = (tensor._base for tensor in tensors if tensor._base is not None)
    base = next(views, max(tensors, key=Tensor.numel))
    if any(tensor.dtype != base.dtype for tensor in tensors) or not is_dense(base):
        return None
    spans = [_span(tensor) for tensor in (base, *tensors)]
    begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
    if (begin, end) == spans[0]:
        return base
    # No tensor spans the memory of all. Without gradients, a tensor made for this purpose can.
    if any(tensor.requires_grad for tensor in tensors):
        return None
    return base.as_strided((end - begin,), (1,), begin)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The range of elements of the storage from the first to the last, half open."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()), int(tensor.storage_offset() + reach + 1)


def _alias(place: int, base: Tensor, tensor: Tensor) -> Alias:
    return Alias(
        place,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset() - base.storage_offset()),
        base.requires_grad and not tensor.requires_grad,
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, so that a copy has the same strides."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _overlap(first: Tensor, second: Tensor) -> bool:
    """False only if certain, as for disjoint slices of one tensor along any of its dimensions."""
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
    """For each dimension, largest stride first, the range of indices of a slice in the tensor it was taken from.

    Last comes the offset within the smallest stride. None if a row of the slice runs into the next row.
    """
    intervals = []
    rest, limit = int(tensor.storage_offset()), None
    for place in order:
        index, rest = divmod(rest, tensor.stride(place))
        end = index + tensor.size(place)
        if limit is not None and end * tensor.stride(place) > limit:
            return None
        intervals.append((index, end))
        limit = tensor.stride(place)
    return [*intervals, (rest, rest + 1)]


def aligned_clone(tensor: Tensor) -> Tensor:
    """A copy that begins as many bytes after a multiple of `ALIGNMENT` as the tensor itself.

    A micro-batch is a view of the mini-batch and may begin anywhere.
    """
    offset = tensor.data_ptr() % ALIGNMENT // tensor.itemsize
    if offset == 0:
        return tensor.clone()
    like = torch.empty_like(tensor)
    memory = torch.empty(offset + like.numel(), dtype=tensor.dtype, device=tensor.device)
    # `data` is no view of `memory`, so layers may write the copy in place like any other.
    return memory.as_strided(like.size(), like.stride(), offset).data.copy_(tensor)
