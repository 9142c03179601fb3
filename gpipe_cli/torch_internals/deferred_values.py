"""Large tensors without memory: until someone asks for their values, which a tape computes, or for good.

Within `DeferredValues.recording`, a dispatch mode, code runs unchanged, with the same values and random numbers. A
large tensor that it makes is on the meta device, and a tape records how to compute it: operations, and the states of
the generators that they draw from. Random operations also run at once, on memory that is freed soon after, so that the
generators advance as they would. Any one of the tensors can be computed later, and only that one. Within
`without_values` nothing of large tensors is drawn, computed or recorded, which takes no time.

Uses `torch.utils._python_dispatch`, `torch.utils._pytree` and parts of `torch._C`, which torch keeps private.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from gpipe_cli.torch_internals.tensors import tensors_in_tree, version_of

_aten = torch.ops.aten


def _operations(names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, name) for name in names.split())


EMPTIES = _operations("empty empty_like empty_strided new_empty new_empty_strided")
"""Operations that make a tensor without values."""
FILLS = _operations(
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_"
)
"""Operations that give a tensor new values without reading those it had."""
MODELLED = _operations(
    "empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like rand_like randint_like "
    "randn_like zeros_like"
)
"""Operations that take a device, a dtype or a shape from a tensor, but no values."""


@final
@dataclass(frozen=True, slots=True)
class View:
    """A tensor without memory, as an argument on the tape."""

    key: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@final
class Storages(dict[int, torch.UntypedStorage]):
    """By key; one that is missing is made, with no values yet."""

    def __init__(self, nbytes: Sequence[int]) -> None:
        self._nbytes = nbytes
        self._spare: torch.UntypedStorage | None = None

    def __missing__(self, key: int) -> torch.UntypedStorage:
        storage, self._spare = self._spare, None
        if storage is None or storage.nbytes() != self._nbytes[key]:
            storage = torch.UntypedStorage(self._nbytes[key])  # type: ignore[no-untyped-call]
        self[key] = storage
        return storage

    def free(self, key: int) -> int:
        """Forget a storage that nothing else uses; how many bytes it has.

        Its memory serves the next of the same size: the system would take as long to clear new memory as it takes to
        draw a quarter of the random numbers for it.
        """
        self._spare = self.pop(key)
        return self._spare.nbytes()

    def free_all(self) -> None:
        self.clear()
        self._spare = None


@final
@dataclass(frozen=True, slots=True)
class TapeStep:
    """One operation on the tape; tensors without memory among its arguments are `View`s."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    made: Mapping[int, int]
    """The keys of new tensors, by their places in the result."""
    generator: torch.Generator
    drawn_from: Tensor | None
    """The generator's state before the operation, if that is random."""

    def run(self, storages: Storages) -> Any:
        args, kwargs = tree_map(
            lambda leaf: leaf.of(storages[leaf.key]) if isinstance(leaf, View) else leaf,
            (self.args, self.kwargs),
        )
        if self.drawn_from is None:
            return self.func(*args, **kwargs)
        state = self.generator.get_state()
        self.generator.set_state(self.drawn_from)
        try:
            return self.func(*args, **kwargs)
        finally:
            self.generator.set_state(state)


@final
class Tape:
    """A tensor is known by its key; views of it share that."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        """The size in bytes of each key's memory."""
        self._steps: list[TapeStep] = []
        self._writers: list[list[int]] = []
        """For each key, the steps that make or change the tensor."""

    def add(self, nbytes: int) -> int:
        """The key of a new tensor."""
        self.nbytes.append(nbytes)
        self._writers.append([])
        return len(self.nbytes) - 1

    def record(self, step: TapeStep, changed: Iterable[int]) -> None:
        for key in {*step.made.values(), *changed}:
            self._writers[key].append(len(self._steps))
        self._steps.append(step)

    @torch.no_grad()
    def compute(self, key: int) -> torch.UntypedStorage:
        """The current value of a tensor, from the steps that it depends on."""
        storages = Storages(self.nbytes)
        for index in self._needed(key):
            step = self._steps[index]
            leaves = tree_leaves(step.run(storages))
            for place, made in step.made.items():
                storages[made] = leaves[place].untyped_storage()
        return storages[key]

    def is_whole(self, view: View) -> bool:
        """Whether the view is contiguous and has every byte of its tensor."""
        stride = 1
        for size, given in zip(reversed(view.size), reversed(view.stride), strict=True):
            if size != 1 and given != stride:
                return False
            stride *= size
        return stride * view.dtype.itemsize == self.nbytes[view.key]

    def _needed(self, key: int) -> list[int]:
        needed: set[int] = set()
        pending, seen = [(key, len(self._steps))], set()
        while pending:
            wanted, before = pending.pop()
            for index in reversed(self._writers[wanted]):
                if index >= before:
                    continue
                if (wanted, index) in seen:
                    break
                seen.add((wanted, index))
                needed.add(index)
                reads = self._reads(self._steps[index])
                pending.extend((other, index) for other in reads if other != wanted)
                # Earlier steps do not matter if nothing of what they wrote remains.
                if wanted not in reads:
                    break
        return sorted(needed)

    def _reads(self, step: TapeStep) -> set[int]:
        """The tensors whose values before the step decide what they or others have after it."""
        first = step.args[0] if step.args else None
        packet = step.func.overloadpacket
        is_unread = isinstance(first, View) and (
            packet in MODELLED or (packet in FILLS and self.is_whole(first))
        )
        others = tree_leaves((step.args[1:] if is_unread else step.args, step.kwargs))
        return {leaf.key for leaf in others if isinstance(leaf, View)}


SMALL = 2**16
"""Elements. Smaller tensors have memory and values: constructors compute with them, and they take little."""
MAX_BYTES_IN_MEMORY = 2**28
"""Bytes of large tensors kept besides one operation's: an initialization may read what it just wrote."""

_CPU, _META = torch.device("cpu"), torch.device("meta")
_paused: ContextVar[bool] = ContextVar("paused", default=False)


@contextmanager
def without_recording() -> Iterator[None]:
    """Inside, tensors are what they are, also within the modes of this file: for code that makes none to keep."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


def without_values() -> AbstractContextManager[object]:
    """Inside, large tensors are on the meta device, whatever device they are made for.

    Small tensors do get memory: constructors compute with them (widths, dropout ratios), which needs values.
    """
    return _WithoutValues()  # type: ignore[no-untyped-call]


@final
class NotDeferrable(RuntimeError):
    """The code inside uses memory that it does not have there."""


@final
class DeferredValues:
    """Large tensors made inside `recording`, and how to compute them."""

    def __init__(self) -> None:
        self._tape = Tape()
        self._keys: dict[int, int] = {}
        """The keys of tensors that are still in use, by the id of their storage."""
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        self._in_memory = Storages(self._tape.nbytes)
        """The current values of a few tensors, the most recently used last."""
        self._filled: dict[int, torch.UntypedStorage] = {}
        self._sources: list[tuple[Tensor, int]] = []
        """Tensors that steps read, too large to be copied, with their versions at that time."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, large tensors have no memory, although they say that they are on the CPU."""
        with _Recorder(self), _OnCpu(self):
            yield
        self._in_memory.free_all()
        if any(version_of(tensor) != version for tensor, version in self._sources):
            raise NotDeferrable("a large tensor changed after others were computed from it")

    def includes(self, tensor: Tensor) -> bool:
        return self._key(tensor) is not None

    def value_of(self, tensor: Tensor) -> Tensor:
        """The value in memory of its own; the tensor itself if it has memory."""
        if self._key(tensor) is None:
            return tensor
        view = self._view(tensor)
        value = view.of(self._tape.compute(view.key))
        # A view of a part would keep the memory of the whole.
        return value if value.nbytes == value.untyped_storage().nbytes() else value.clone()

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Give these very tensors memory and their values; they share memory with each other as in a plain model."""
        for tensor in tensors:
            if self._key(tensor) is None:
                continue
            view = self._view(tensor)
            if view.key not in self._filled:
                self._filled[view.key] = self._tape.compute(view.key)
            replace_value(tensor, view.of(self._filled[view.key]))

    def in_use(self, besides: Iterable[Tensor]) -> int:
        """How many tensors without memory something still refers to, except for those that share memory with these."""
        others = {self._key(tensor) for tensor in besides}
        return len(set(self._keys.values()) - others)

    # What follows is for `_Recorder`.

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in_tree((args, kwargs))
        deferred = [tensor for tensor in tensors if self.includes(tensor)]
        is_for_meta = kwargs.get("device") == _META
        if not deferred:
            # `tensor[index] = number` makes a tensor of the number on the device of the tensor.
            if is_for_meta and func.overloadpacket is _aten.scalar_tensor:
                return self._execute(func, args, {**kwargs, "device": _CPU}, [], largest=0)
            return self._execute(func, args, kwargs, [])
        if is_for_meta or func.is_view or torch.Tag.inplace_view in func.tags:
            return self._run_on_meta(func, args, kwargs)
        if any(tensor.is_meta and not self.includes(tensor) for tensor in tensors):
            raise NotDeferrable(f"{func} combines a large tensor with one that has no values")
        written = _written(func, args, kwargs)
        changed = [tensor for tensor in written if self.includes(tensor)]
        if len(changed) not in (0, len(written)):
            raise NotDeferrable(f"{func} writes to tensors with memory and without")
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if changed and not is_random and any(self._key(tensor) not in self._in_memory for tensor in deferred):
            return self._record_only(func, args, kwargs, changed)
        return self._execute(func, args, kwargs, changed)

    def _record_only(self, func: Any, args: Any, kwargs: dict[str, Any], changed: list[Tensor]) -> Any:
        """For an operation on values that are not in memory, and may never be needed."""
        self._record(func, args, kwargs, changed, {})
        for view in map(self._view, changed):
            self._in_memory.pop(view.key, None)
        returned = len(func._schema.returns)
        return None if not returned else changed[0] if returned == 1 else changed

    def _execute(
        self, func: Any, args: Any, kwargs: dict[str, Any], changed: list[Tensor], largest: int | None = None
    ) -> Any:
        """Run an operation, record it if it makes or changes large tensors, and return these without memory."""
        tensors = tensors_in_tree((args, kwargs))
        deferred = [tensor for tensor in tensors if self.includes(tensor)]
        generator = kwargs.get("generator") or torch.default_generator
        drawn_from = generator.get_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        real = {id(tensor): self._argument(tensor, func, tensor is args[0]) for tensor in deferred}
        real_args, real_kwargs = tree_map(lambda leaf: real.get(id(leaf), leaf), (args, kwargs))
        leaves, structure = tree_flatten(func(*real_args, **real_kwargs))
        known = {
            id(tensor.untyped_storage()) for tensor in (*tensors, *real.values()) if _has_storage(tensor)
        }
        made = {
            place: leaf
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
            and _is_large(leaf, SMALL if largest is None else largest)
            and id(leaf.untyped_storage()) not in known
        }
        if len({id(leaf.untyped_storage()) for leaf in made.values()}) < len(made):
            raise NotDeferrable(f"{func} returns tensors that share memory")
        if changed or made:
            has_values = func.overloadpacket not in EMPTIES
            new = {place: self._new(leaf, has_values=has_values) for place, leaf in made.items()}
            self._record(func, args, kwargs, changed, new, generator, drawn_from)
            outlines = {id(real[id(tensor)]): tensor for tensor in changed}
            leaves = [new.get(place, outlines.get(id(leaf), leaf)) for place, leaf in enumerate(leaves)]
        freed = {id(tensor.untyped_storage()) for tensor in real.values()}
        if any(
            id(tensor.untyped_storage()) in freed
            for tensor in tensors_in_tree(leaves)
            if _has_storage(tensor)
        ):
            raise NotDeferrable(f"{func} returns memory of a large tensor")
        self._free(besides=deferred)
        return tree_unflatten(leaves, structure)

    def _run_on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A view has the memory of its base, so nothing is recorded."""
        if func.overloadpacket in (_aten.resize_, _aten._conj, _aten._neg_view):
            raise NotDeferrable(f"{func} has no equivalent without memory")
        return func(*args, **kwargs)

    def _argument(self, tensor: Tensor, func: Any, is_first: bool) -> Tensor:
        """The tensor in memory, with its value unless the operation does not read that."""
        view = self._view(tensor)
        is_filled = is_first and func.overloadpacket in FILLS and self._tape.is_whole(view)
        if view.key not in self._in_memory and not is_filled:
            if is_first and func.overloadpacket in FILLS | MODELLED:
                return torch.empty_strided(view.size, view.stride, dtype=view.dtype)
            self._in_memory[view.key] = self._tape.compute(view.key)
        storage = self._in_memory[view.key]
        self._in_memory[view.key] = self._in_memory.pop(view.key)
        return view.of(storage)

    def _new(self, value: Tensor, *, has_values: bool) -> Tensor:
        """A tensor without memory that has this value."""
        storage = value.untyped_storage()
        outline = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        stands_in, key = outline.untyped_storage(), self._tape.add(storage.nbytes())
        place = id(stands_in)
        self._keys[place] = key
        self._storages.append(weakref.ref(stands_in, lambda _: self._keys.pop(place, None)))
        if has_values:
            self._in_memory[key] = storage
        return outline

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        changed: Sequence[Tensor],
        new: Mapping[int, Tensor],
        generator: torch.Generator = torch.default_generator,
        drawn_from: Tensor | None = None,
    ) -> None:
        views = {id(tensor): self._on_tape(tensor) for tensor in tensors_in_tree((args, kwargs))}
        kept_args, kept_kwargs = tree_map(lambda leaf: views.get(id(leaf), leaf), (args, dict(kwargs)))
        made = {place: self._view(outline).key for place, outline in new.items()}
        step = TapeStep(func, kept_args, kept_kwargs, made, generator, drawn_from)
        self._tape.record(step, [self._view(tensor).key for tensor in changed])

    def _on_tape(self, tensor: Tensor) -> View | Tensor:
        if self._key(tensor) is not None:
            return self._view(tensor)
        if tensor.numel() <= SMALL:
            return tensor.detach().clone()
        self._sources.append((tensor, version_of(tensor)))
        return tensor

    def _free(self, besides: Sequence[Tensor]) -> None:
        """Drop the values that were used least recently."""
        kept = {self._key(tensor) for tensor in besides}
        excess = sum(storage.nbytes() for storage in self._in_memory.values()) - MAX_BYTES_IN_MEMORY
        for key in list(self._in_memory):
            if excess <= 0:
                return
            if key not in kept:
                excess -= self._in_memory.free(key)

    def _key(self, tensor: Tensor) -> int | None:
        if not tensor.is_meta or tensor.layout is not torch.strided:
            return None
        return self._keys.get(id(tensor.untyped_storage()))

    def _view(self, tensor: Tensor) -> View:
        key = self._key(tensor)
        assert key is not None, "the caller has checked this"
        return View(key, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def replace_value(tensor: Tensor, value: Tensor) -> None:
    """Let this very tensor, wherever it is used, have the memory of another one."""
    replacement = Tensor._make_subclass(type(tensor), value, tensor.requires_grad)
    # Not torch.utils.swap_tensors: it refuses tensors with weak references, such as the weights of an LSTM.
    torch._C._swap_tensor_impl(tensor, replacement)


def tensors_in_attributes(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters, buffers, and tensors in other attributes, also in lists, tuples and dicts."""
    return tensors_in_tree([dict(vars(module)) for module in modules])


@final
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, values: DeferredValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _paused.get():
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._values.run(func, args, dict(kwargs or {}))


@final
class _WithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if _paused.get():
            return func(*args, **named)
        if func.overloadpacket in FILLS and args[0].is_meta:
            return args[0]  # torch would import its compiler to fill it
        if _makes_from_numbers(func):
            # A generator belongs to a device, and nothing is drawn on the meta device.
            here = dict.fromkeys(named.keys() & {"generator", "pin_memory"})
            tensor: Tensor = func(*args, **{**named, **here, "device": _META})
            if tensor.numel() > SMALL:
                return tensor
        return func(*args, **named)


@functools.cache
def _makes_from_numbers(func: Any) -> bool:
    arguments = func._schema.arguments
    return any(argument.name == "device" for argument in arguments) and not any(
        "Tensor" in str(argument.type) for argument in arguments
    )


@final
class _OnCpu(TorchFunctionMode):
    """Tells code that asks that the tensors have memory, or it would not initialize them."""

    def __init__(self, values: DeferredValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if (func in _ANSWERS or func in _POINTERS) and not _paused.get() and self._values.includes(args[0]):
            if func in _POINTERS:
                raise NotDeferrable(f"{func.__name__} needs the memory of a large tensor")
            return _ANSWERS[func]
        return func(*args, **(kwargs or {}))


_GETTERS: Any = Tensor
_ANSWERS: dict[Any, Any] = {
    _GETTERS.device.__get__: torch.device("cpu"),
    _GETTERS.is_cpu.__get__: True,
    _GETTERS.is_meta.__get__: False,
}
_POINTERS = frozenset(
    {
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.share_memory_,
        Tensor.storage,
        Tensor.tolist,
        Tensor.untyped_storage,
    }
)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _is_large(tensor: Tensor, largest: int) -> bool:
    return tensor.numel() > largest and tensor.device.type == "cpu" and _has_storage(tensor)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that the operation writes to."""
    if not func._schema.is_mutable:
        return []
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return tensors_in_tree(written)
