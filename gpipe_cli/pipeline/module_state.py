"""The parameters and buffers of a partition's layers, around forward and recompute.

Recompute works on copies of the buffers as they were before the forward, so it repeats the forward and changes nothing.
A forward that keeps its graph works on copies too, because the graph may save a buffer that the next micro-batch
changes. Values decide whether a buffer changed, not version counters: batch norm and writes through `.data` do not
count. Buffers that keep their value share one copy in all micro-batches.

Parameters are too large to be copied. Autograd checks the version counters of those that a graph saved; a checkpointed
forward has no graph until recompute, so this file checks the version counters instead.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.torch_internals.tensors import storage_of, version_of, versions_of

_UNCHANGED = contextlib.nullcontext()


def tensors_in(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every parameter and buffer with the module that holds it and its name there: a shared one several times."""
    for part in module.modules():
        for name, tensor in chain(part._parameters.items(), part._buffers.items()):
            if tensor is not None:
                yield part, name, tensor


def buffer_owners(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules with buffers, except deferred batch norm: it commits its statistics after the forward."""
    return [each for each in modules if each._buffers and not isinstance(each, DeferredBatchNorm)]


def modules_of(layers: Sequence[nn.Module]) -> dict[nn.Module, None]:
    """Every module of the layers, once; `nn.Module.modules` would take several times as long, to build names."""
    modules = dict.fromkeys(layers)
    waiting = list(layers)
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in modules:
                modules[child] = None
                waiting.append(child)
    return modules


@final
class BufferState:
    """The buffers of some modules at one moment: the tensor under each name, and a copy of its value."""

    __slots__ = ("names", "values", "versions")

    def __init__(
        self, owners: Collection[nn.Module], copies: dict[Tensor, Tensor | None] | None = None
    ) -> None:
        """copies: of tensors that have the same value now."""
        self.names = [(owner, dict(owner._buffers)) for owner in owners]
        self.values: dict[Tensor, Tensor] = {}
        self.versions: dict[Tensor, int] = {}
        for _, named in self.names:
            for tensor in named.values():
                # One that requires grad is left to autograd, as a parameter is.
                if tensor is not None and tensor not in self.values and not tensor.requires_grad:
                    copy = None if copies is None else copies.get(tensor)
                    self.values[tensor] = tensor.clone() if copy is None else copy
                    self.versions[tensor] = version_of(tensor)

    def restore(self) -> None:
        """Undo all changes since."""
        for owner, named in self.names:
            _set_buffers(owner, named)
        for tensor, value in self.values.items():
            if not _equal(tensor, value):
                with torch.no_grad():
                    tensor.copy_(value)

    def changes(self) -> list[tuple[Tensor, Tensor]]:
        """Each buffer as it is now, with its value then."""
        return [
            (owner._buffers[name], self.values[tensor])  # type: ignore[misc]
            for owner, named in self.names
            for name, tensor in named.items()
            if tensor in self.values and owner._buffers.get(name) is not None
        ]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Context manager: inside, the modules have copies of these values as their buffers."""
        # Copying the values into the buffers and back would not do: batch norm saves its buffers for backward, and
        # autograd would notice the write.
        copies: dict[Tensor | None, Tensor] = {tensor: value.clone() for tensor, value in self.values.items()}
        current = [(owner, dict(owner._buffers)) for owner, _ in self.names]
        for owner, named in self.names:
            _set_buffers(owner, {name: copies.get(tensor, tensor) for name, tensor in named.items()})
        try:
            yield
        finally:
            for owner, named in current:
                _set_buffers(owner, named)


def _equal(first: Tensor, second: Tensor) -> bool:
    """False for a sparse tensor, which torch cannot compare: it is copied as if it had changed."""
    return first.layout is torch.strided and torch.equal(first, second)


def _set_buffers(owner: nn.Module, named: dict[str, Tensor | None]) -> None:
    owner._buffers.clear()
    owner._buffers.update(named)


@final
@dataclass(frozen=True, slots=True)
class SharedState:
    """What several partitions hold, so no forward may change it: they would see the change at different times."""

    modules: Collection[nn.Module] = ()
    parameters: Collection[Tensor] = ()
    buffers: Collection[int] = ()
    """Their storages."""

    @classmethod
    def between(cls, partitions: Sequence[Iterable[nn.Module]]) -> SharedState:
        """partitions: the layers of each."""
        if len(partitions) == 1:
            return NOTHING_SHARED
        users: list[Counter[Any]] = [Counter(), Counter(), Counter()]
        for layers in partitions:
            modules = modules_of(list(layers))
            parameters = {each for module in modules for each in module._parameters.values()}
            buffers = {each for module in modules for each in module._buffers.values()}
            storages = {storage_of(each) for each in buffers if each is not None}
            users[0].update(list(modules))
            users[1].update(parameters - {None})
            users[2].update(storages)
        return cls(*({each for each, count in counter.items() if count > 1} for counter in users))

    @property
    def any(self) -> bool:
        return bool(self.modules or self.parameters or self.buffers)

    def refuse_change(self, layer: str, kind: str, name: str) -> None:
        raise RuntimeError(
            f"{layer} changes the {kind} '{name}' in its forward, and another partition holds it too, so the result "
            "would depend on which of them runs first. Put the layers that share it into one partition, or do not "
            "share it"
        )


NOTHING_SHARED = SharedState()


@final
class PartitionState:
    """The buffers and parameters of one partition, from micro-batch to micro-batch."""

    __slots__ = (
        "_at_begin",
        "_copies",
        "_layers",
        "_modules",
        "_owners",
        "_shared",
        "_storages",
        "parameters",
    )

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._copies: dict[Tensor, Tensor | None] = {}
        """A copy of each buffer that kept its value when the layers ran last; None for one that did not."""
        self._at_begin: BufferState | None = None
        self._modules: Collection[nn.Module] = ()
        self._owners: list[nn.Module] = []
        """The modules that have buffers."""
        self._shared = NOTHING_SHARED
        self._storages: set[int] | None = None
        self.parameters = NO_PARAMETERS

    def begin(self, shared: SharedState, loss_modules: Sequence[nn.Module] = ()) -> None:
        """Look at the modules once per mini-batch. loss_modules: those of the loss, after the last layer."""
        self._modules = modules_of([layer.module for layer in self._layers]) | dict.fromkeys(loss_modules)
        self._owners = buffer_owners(self._modules)
        self.parameters = ModuleParameters(self._modules)
        self._shared, self._storages = shared, None
        held = {buffer for owner in self._owners for buffer in owner._buffers.values()}
        # The caller may have written a buffer since, in a way that no version counter shows.
        self._copies = {
            buffer: copy
            for buffer, copy in self._copies.items()
            if buffer in held and (copy is None or _equal(buffer, copy))
        }
        self._at_begin = self._save()

    def end(self, *, failed: bool) -> None:
        """End the mini-batch. failed: give the buffers back the values they had before it."""
        if failed and self._at_begin is not None:
            self._at_begin.restore()
        self._at_begin = None

    def _save(self) -> BufferState:
        return BufferState(self._owners, self._copies)

    @contextlib.contextmanager
    def repeatable(self) -> Iterator[BufferState]:
        """Context manager around a forward that recompute will repeat, with the buffers that it yields."""
        before, versions = self._save(), self._shared_versions()
        yield before
        self._note_changes(before)
        self._refuse_shared_parameters(versions)

    def separate(self, *, keeps_graph: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager around any other forward: inside, buffers that layers may change are copies for its graph."""
        return self._separate() if (self._owners and keeps_graph) or self._shared.any else _UNCHANGED

    @contextlib.contextmanager
    def _separate(self) -> Iterator[None]:
        before, versions = self._save(), self._shared_versions()
        copies: dict[Tensor | None, Tensor] = {
            buffer: copy
            for buffer, copy in before.values.items()
            if self._copies.get(buffer) is None and storage_of(buffer) not in self._shared.buffers
        }
        for owner, named in before.names:
            _set_buffers(owner, {name: copies.get(buffer, buffer) for name, buffer in named.items()})
        try:
            yield
        finally:
            originals: dict[Tensor | None, Tensor | None] = {copy: buffer for buffer, copy in copies.items()}
            for owner, _ in before.names:
                named = {name: originals.get(each, each) for name, each in owner._buffers.items()}
                _set_buffers(owner, named)
        for buffer in self._note_changes(before):
            if buffer in copies:
                with torch.no_grad():
                    buffer.copy_(copies[buffer])
            else:
                # It changed for the first time. A graph that saved it must notice, even if autograd did not count.
                torch.autograd.graph.increment_version(buffer)
        self._refuse_shared_parameters(versions)

    def refuse_written(self, parameters: ModuleParameters, versions: ParameterVersions) -> None:
        """Raise if a forward that is run twice wrote a parameter. versions: those before it."""
        for owner, name in parameters.written_since(versions):
            raise RuntimeError(
                f"{self._layer_of(owner)} writes its parameter '{name}' in its forward, and recompute would write it "
                "again. Make it a buffer, or use checkpoint='never'"
            )

    def storages(self) -> set[int]:
        """The storages of the parameters and buffers, as the layers use them now."""
        if self._storages is None:
            self._storages = self.parameters.storages()
        buffers = (each for owner in self._owners for each in owner._buffers.values() if each is not None)
        return self._storages.union(storage_of(each) for each in buffers if each.layout is torch.strided)

    def _shared_versions(self) -> ParameterVersions | None:
        return self.parameters.versions() if self._shared.parameters else None

    def _refuse_shared_parameters(self, versions: ParameterVersions | None) -> None:
        for owner, name in [] if versions is None else self.parameters.written_since(versions):
            if owner in self._shared.modules or owner._parameters.get(name) in self._shared.parameters:
                self._shared.refuse_change(self._layer_of(owner), "parameter", name)

    def _note_changes(self, before: BufferState) -> list[Tensor]:
        """The buffers that a forward may have changed. Raise if it changed one that another partition holds."""
        # A module whose first buffer the forward registered had none for recompute to start from.
        owners = buffer_owners(self._modules)
        if len(owners) > len(self._owners):
            before.names += [(owner, {}) for owner in owners if owner not in self._owners]
            self._owners = owners
        changed = []
        for buffer, copy in before.values.items():
            if self._shared.buffers and storage_of(buffer) in self._shared.buffers:
                continue
            # Comparing values makes the host wait for an accelerator: there, any buffer may have changed.
            may_change = self._copies.get(buffer, copy) is None or is_accelerator(buffer.device)
            if may_change or not _equal(buffer, copy):
                changed.append(buffer)
                self._copies[buffer] = None
            else:
                self._copies[buffer] = copy
        if self._shared.buffers or self._shared.modules:
            self._refuse_shared_buffers(before)
        return changed

    def _refuse_shared_buffers(self, before: BufferState) -> None:
        for owner, named in before.names:
            now = owner._buffers if owner in self._shared.modules else named
            for name in {**named, **now}:
                if now.get(name) is not named.get(name) or self._is_written(named.get(name), before):
                    self._shared.refuse_change(self._layer_of(owner), "buffer", name)

    def _is_written(self, buffer: Tensor | None, before: BufferState) -> bool:
        """Whether a shared buffer has changed: on an accelerator by its version counter, for the same reason."""
        if buffer not in before.values or storage_of(buffer) not in self._shared.buffers:
            return False
        if is_accelerator(buffer.device):
            return version_of(buffer) != before.versions[buffer]
        return not _equal(buffer, before.values[buffer])

    def _layer_of(self, module: nn.Module) -> str:
        """The name of the layer that holds a module; otherwise the loss does."""
        holders = (layer for layer in self._layers if module in modules_of([layer.module]))
        return next((f"layer {layer!r}" for layer in holders), "the loss")


class ParameterVersions(NamedTuple):
    """What changes if a parameter is written, as far as autograd counts it, or gets other memory."""

    counters: list[int]
    addresses: list[int]


@final
class ModuleParameters:
    """The parameters of some modules at one moment."""

    __slots__ = ("_dictionaries", "_modules", "_names", "_parameters")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        held = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.is_inference()  # such a one has no version counter
        ]
        self._modules = [module for module, _, _ in held]
        self._names = [name for _, name, _ in held]
        self._parameters = [parameter for _, _, parameter in held]
        self._dictionaries = [module._parameters for module in self._modules]

    @property
    def any_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self._parameters)

    def storages(self) -> set[int]:
        return set(map(storage_of, self._parameters))

    def versions(self) -> ParameterVersions:
        counters = versions_of(self._parameters)
        return ParameterVersions(counters, list(map(Tensor.data_ptr, self._parameters)))

    def written_since(self, versions: ParameterVersions) -> list[tuple[nn.Module, str]]:
        """The parameters that were written or replaced."""
        now = self.versions()
        if now == versions and all(self._in_place()):
            return []
        unchanged = zip(zip(*now, strict=True), zip(*versions, strict=True), self._in_place(), strict=True)
        written = [not in_place or after != before for after, before, in_place in unchanged]
        return list(compress(zip(self._modules, self._names, strict=True), written))

    def _in_place(self) -> Iterator[bool]:
        """Whether each module still has its parameter."""
        return map(operator.is_, map(dict.get, self._dictionaries, self._names), self._parameters)

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: inside, the modules have these parameters even if others replaced them since."""
        if all(self._in_place()):
            return _UNCHANGED
        return _swapped(list(zip(self._modules, self._names, self._parameters, strict=True)))


@contextlib.contextmanager
def _swapped(held: Sequence[tuple[nn.Module, str, nn.Parameter]]) -> Iterator[None]:
    current = [module._parameters.get(name) for module, name, _ in held]
    for module, name, parameter in held:
        module._parameters[name] = parameter
    try:
        yield
    finally:
        for (module, name, _), before in zip(held, current, strict=True):
            module._parameters[name] = before


NO_PARAMETERS = ModuleParameters(())


def modified_in_place(what: str, partition: int) -> RuntimeError:
    """The error that autograd would raise, for a partition that has no graph before recompute."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} was changed between forward and backward, so partition {partition} cannot be recomputed "
        "to the same values"
    )
