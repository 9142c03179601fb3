"""The parameters and buffers of a partition's layers, around forward, recompute and backward.

Recompute works on copies of the buffers as they were before the forward, so it repeats the forward and changes nothing.
A graph that saved a buffer keeps it as it was while later micro-batches change it. Autograd checks the version counters
of what a graph saved; a checkpointed forward has no graph until recompute, so this file checks them instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm
from gpipe_cli.torch_internals.tensor_memory import version_of

_UNCHANGED = contextlib.nullcontext()


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


def tensors_in(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every parameter and buffer with the module that holds it and its name there: a shared one several times."""
    for part in module.modules():
        for name, tensor in chain(part._parameters.items(), part._buffers.items()):
            if tensor is not None:
                yield part, name, tensor


def all_buffers(layers: Sequence[nn.Module]) -> list[Buffer]:
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    return [Buffer(module, name) for module in modules for name, _ in module.named_buffers(recurse=False)]


def save_buffers(buffers: Sequence[Buffer]) -> tuple[SavedBuffer, ...]:
    return tuple(SavedBuffer(buffer, buffer.get(), buffer.get().clone()) for buffer in buffers)


def changed_buffers(saved: Sequence[SavedBuffer], written: Sequence[Buffer] = ()) -> tuple[Buffer, ...]:
    """All buffers of the modules that changed or wrote any: a value that happened to stay may change next time."""
    modules = {buffer.module for buffer in written} | {
        item.buffer.module
        for item in saved
        if item.buffer.get() is not item.original or not torch.equal(item.original, item.value)
    }
    return tuple(item.buffer for item in saved if item.buffer.module in modules)


def restore_buffers(saved: Sequence[SavedBuffer]) -> None:
    """Undo all changes since `save_buffers`."""
    for item in saved:
        item.original.copy_(item.value)
        setattr(item.buffer.module, item.buffer.name, item.original)


def use_saved_buffers(saved: Sequence[SavedBuffer]) -> contextlib.AbstractContextManager[None]:
    """Context manager: inside, the modules see copies of the saved values in place of their buffers."""
    return _swapped_buffers(saved) if saved else _UNCHANGED


@contextlib.contextmanager
def _swapped_buffers(saved: Sequence[SavedBuffer]) -> Iterator[None]:
    # Copying the values into the buffers and back would not do: batch norm saves its buffers for backward, and autograd
    # would notice the write.
    current = [item.buffer.get() for item in saved]
    for item in saved:
        setattr(item.buffer.module, item.buffer.name, item.value.clone())
    try:
        yield
    finally:
        for item, tensor in zip(saved, current, strict=True):
            setattr(item.buffer.module, item.buffer.name, tensor)


@final
class BufferCopies:
    """Context manager: inside, modules use copies of their buffers; at the end the buffers receive the copies' values.

    So a graph built inside holds tensors that are never written again. Compiled batch norm saves its buffers for
    backward; without copies, the next micro-batch would write them and autograd would refuse to run the graph.
    """

    __slots__ = ("_buffers", "_copies", "_originals")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers

    def __enter__(self) -> BufferCopies:
        self._originals = [buffer.get() for buffer in self._buffers]
        self._copies = [original.clone() for original in self._originals]
        for buffer, copy in zip(self._buffers, self._copies, strict=True):
            setattr(buffer.module, buffer.name, copy)
        return self

    def __exit__(self, *exception: object) -> None:
        for buffer, copy, original in zip(self._buffers, self._copies, self._originals, strict=True):
            if buffer.get() is not copy:
                continue  # the layer replaced the buffer
            setattr(buffer.module, buffer.name, original)
            # If every micro-batch counted as a write, graphs that saved the original would refuse to run. Kernels may
            # write a buffer without counting it, so values decide. Comparing them makes the host wait: it comes last.
            if version_of(copy) or not torch.equal(original, copy):
                with torch.no_grad():
                    original.copy_(copy)

    @property
    def written(self) -> tuple[Buffer, ...]:
        """The buffers whose version counters show a write inside."""
        return tuple(
            buffer for buffer, copy in zip(self._buffers, self._copies, strict=True) if version_of(copy)
        )


@final
class ModuleTensors:
    """The current parameters, buffers and training modes of some layers."""

    __slots__ = ("_tensors", "parameters", "training")

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = _modules_of(layers)
        self.training = tuple([module.training for module in modules])
        self._tensors: list[tuple[nn.Module, dict[str, Any], str, Tensor]] = []
        self.parameters: list[Tensor] = []
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._tensors.append((module, module._parameters, name, parameter))
                    self.parameters.append(parameter)
            # Deferred batch norm commits its statistics after the forward, and recompute does not use them.
            if module._buffers and not isinstance(module, DeferredBatchNorm):
                self._tensors += [
                    (module, module._buffers, name, buffer)
                    for name, buffer in module._buffers.items()
                    if buffer is not None
                ]

    def versions(self, but: Collection[nn.Module]) -> int:
        """A number that grows with every write to these tensors, except those of the modules in `but`."""
        return sum(
            [version_of(tensor) for module, _, _, tensor in self._tensors if not but or module not in but]
        )

    def restored(self, but: Collection[nn.Module]) -> contextlib.AbstractContextManager[None]:
        """Context manager: inside, modules use these tensors even if others replaced them; not the modules in `but`."""
        replaced = [
            (holder, name, tensor, holder.get(name))
            for module, holder, name, tensor in self._tensors
            if holder.get(name) is not tensor and module not in but
        ]
        return _swapped(replaced) if replaced else _UNCHANGED


def _modules_of(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Every module of each layer, once; `nn.Module.modules` would take several times as long, to build names."""
    modules = []
    for layer in layers:
        visited = {layer}
        waiting = [layer]
        while waiting:
            module = waiting.pop()
            modules.append(module)
            for child in reversed(module._modules.values()):
                if child is not None and child not in visited:
                    visited.add(child)
                    waiting.append(child)
    return modules


@contextlib.contextmanager
def _swapped(tensors: Sequence[tuple[dict[str, Any], str, Tensor, Any]]) -> Iterator[None]:
    for holder, name, tensor, _ in tensors:
        holder[name] = tensor
    try:
        yield
    finally:
        for holder, name, _, current in tensors:
            holder[name] = current


NO_TENSORS = ModuleTensors(())


def modified_in_place(what: str, partition: int) -> RuntimeError:
    """The error that autograd would raise, for a partition that has no graph before recompute."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} was changed between forward and backward, so partition {partition} cannot be recomputed "
        "to the same values"
    )
