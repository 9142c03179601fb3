"""The memory of tensors: their storage, their layout and their version counters."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

ALIGNMENT = 64
"""Bytes. torch allocates memory at multiples of it; for a tensor that begins elsewhere, kernels use other vector
instructions at its edges, and give other bits."""


_COUNTER = operator.attrgetter("_version")


def storage_of(tensor: Tensor) -> int:
    """A number shared by a tensor and its views. Another tensor may get it once they are all freed."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in_tree(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """The version counters of tensors that are no inference tensors, such as parameters that are trained."""
    return list(map(_COUNTER, tensors))


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one, which is its base."""
    return tensor._base is not None


def is_untracked_view(tensor: Tensor) -> bool:
    """Whether the tensor is a view of a leaf that was made without a graph: it requires grad, but receives none."""
    return tensor.requires_grad and tensor.grad_fn is None and is_view(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, so that a copy has the same strides."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def copy_memory(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Copies with the strides and the alignment of the originals, sharing memory with each other as those do.

    Strides and alignment decide which kernels run, and with them the bits of results.
    """
    if len(tensors) == 1 and tensors[0] is not None and _is_copied_as_it_lies(tensors[0]):
        return (tensors[0].clone(),)
    ranges: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if type(tensor) is Tensor:
            begin, end = _byte_range(tensor)
            known = ranges.get(storage_of(tensor), (begin, end))
            ranges[storage_of(tensor)] = min(begin, known[0]), max(end, known[1])
    copies: dict[int, Tensor] = {}
    return tuple(
        tensor if tensor is None else _copied(tensor, ranges.get(storage_of(tensor)), copies)
        for tensor in tensors
    )


def _is_copied_as_it_lies(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """From the first byte to behind the last one, counted from the beginning of the storage."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize if tensor.numel() else begin


def _copied(tensor: Tensor, byte_range: tuple[int, int] | None, copies: dict[int, Tensor]) -> Tensor:
    if byte_range is None:
        return tensor.clone()  # a subclass, which knows best how to copy itself
    begin, end = byte_range
    storage = tensor.untyped_storage()
    padding = (storage.data_ptr() + begin) % ALIGNMENT
    memory = copies.get(storage_of(tensor))
    if memory is None:
        memory = torch.empty(padding + end - begin, dtype=torch.uint8, device=tensor.device)
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        with torch.no_grad():
            memory[padding:].copy_(source.set_(storage, begin, (end - begin,), (1,)))
        copies[storage_of(tensor)] = memory
    offset = padding - begin + tensor.storage_offset() * tensor.itemsize
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(memory.untyped_storage(), offset // tensor.itemsize, tensor.shape, tensor.stride())


@functools.cache
def exchanges_memory(device: torch.device) -> bool:
    """Whether `tensor.data = other` may replace host memory by memory of the device, and back.

    Not for devices whose kind torch does not know itself: those of PrivateUse1, such as NPUs.
    """
    return bool(torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device)))
