"""Buffers that change when a layer runs, such as the running statistics of batch norm.

Decides how to find them; that recomputation works on copies of their values before the forward, so that it repeats
what the forward did and changes nothing; and that a graph which saved a buffer keeps it as it was while later
micro-batches change it. Knows nothing of partitions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.torch_internals.tensor_version import version_of

__all__ = [
    "Buffer",
    "SavedBuffer",
    "WrittenApart",
    "all_buffers",
    "changed",
    "restore",
    "save",
    "swapped_in",
]


@final
@dataclass(frozen=True, slots=True)
class Buffer:
    module: nn.Module
    name: str

    def get(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.name)
        return tensor


@final
@dataclass(frozen=True, slots=True)
class SavedBuffer:
    buffer: Buffer
    original: Tensor
    value: Tensor


def all_buffers(layers: Sequence[nn.Module]) -> list[Buffer]:
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    return [Buffer(module, name) for module in modules for name, _ in module.named_buffers(recurse=False)]


def save(buffers: Sequence[Buffer]) -> tuple[SavedBuffer, ...]:
    return tuple(SavedBuffer(buffer, buffer.get(), buffer.get().clone()) for buffer in buffers)


def changed(saved: Sequence[SavedBuffer], written: Sequence[Buffer] = ()) -> tuple[Buffer, ...]:
    """All buffers of the modules that changed or wrote any: a mean that happened to stay will move the next time."""
    modules = {buffer.module for buffer in written} | {
        item.buffer.module
        for item in saved
        if item.buffer.get() is not item.original or not torch.equal(item.original, item.value)
    }
    return tuple(item.buffer for item in saved if item.buffer.module in modules)


def restore(saved: Sequence[SavedBuffer]) -> None:
    """Undo what happened since `save`."""
    for item in saved:
        item.original.copy_(item.value)
        setattr(item.buffer.module, item.buffer.name, item.original)


@contextlib.contextmanager
def swapped_in(saved: Sequence[SavedBuffer]) -> Iterator[None]:
    """Inside, the modules see copies of the saved values in place of their buffers.

    Copying into the buffers and back would not do: batch norm saves them for backward, and a write would be
    noticed.
    """
    now = [item.buffer.get() for item in saved]
    for item in saved:
        setattr(item.buffer.module, item.buffer.name, item.value.clone())
    try:
        yield
    finally:
        for item, tensor in zip(saved, now, strict=True):
            setattr(item.buffer.module, item.buffer.name, tensor)


@final
class WrittenApart:
    """Context manager: inside, the modules see copies of their buffers; afterwards the buffers have the copies' values.

    So a graph made inside holds tensors that nobody writes again. Compiled batch norm saves its buffers for backward,
    and the next micro-batch writes them: autograd would refuse to run the graph.
    """

    __slots__ = ("_buffers", "_copies", "_originals")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers

    def __enter__(self) -> WrittenApart:
        self._originals = [buffer.get() for buffer in self._buffers]
        self._copies = [original.clone() for original in self._originals]
        for buffer, copy in zip(self._buffers, self._copies, strict=True):
            setattr(buffer.module, buffer.name, copy)
        return self

    def __exit__(self, *exception: object) -> None:
        for buffer, copy, original in zip(self._buffers, self._copies, self._originals, strict=True):
            if buffer.get() is not copy:
                continue  # the layer has put a tensor of its own there
            setattr(buffer.module, buffer.name, original)
            if not torch.equal(original, copy):
                with torch.no_grad():
                    original.copy_(copy)

    @property
    def written(self) -> tuple[Buffer, ...]:
        """Those that autograd saw written inside."""
        return tuple(
            buffer for buffer, copy in zip(self._buffers, self._copies, strict=True) if version_of(copy)
        )
