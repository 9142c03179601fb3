"""A dispatch mode that moves large tensors out of memory until an operation needs them.

The code inside runs unchanged, with the same values and random numbers, but only a limited number of bytes of its
large tensors is in memory at once. A spilled storage has a size of zero until the mode fills it again, so nothing
else may read it. Uses `torch.utils._python_dispatch`, which torch keeps private.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SMALL = 2**16
"""Bytes. Smaller tensors stay in memory: constructors compute with them, and moving them would gain nothing."""


class Room(Protocol):
    def read(self, begin: int, into: Tensor) -> None: ...
    def write(self, begin: int, source: Tensor) -> None: ...


@contextmanager
def spilling(make_room: Callable[[int], Room], in_memory: int) -> Iterator[Spilling]:
    """Inside, at most `in_memory` bytes of large tensors are in memory, besides those of one operation."""
    mode = Spilling(make_room, in_memory)
    with mode:
        yield mode


@final
class Spilling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, make_room: Callable[[int], Room], in_memory: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._make_room = make_room
        self._in_memory = in_memory
        self._known: dict[int, _Spilled] = {}
        """By the id of the storage, the most recently used last."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        used = [self._known[key] for key in _storages(args, kwargs) if key in self._known]
        for storage_state in used:
            self._touch(storage_state)
        result = func(*args, **(kwargs or {}))
        for key, storage in _storages(result).items():
            if key not in self._known and storage.nbytes() > _SMALL:
                used.append(self._meet(key, storage))
        self._put_away(besides=used)
        return result

    def give_back(self, tensor: Tensor) -> Tensor:
        """The tensor itself, in memory, and never spilled again."""
        known = self._known.pop(id(tensor.untyped_storage()), None)
        if known is not None:
            known.fill()
        return tensor

    def _meet(self, key: int, storage: torch.UntypedStorage) -> _Spilled:
        known = self._known[key] = _Spilled(key, weakref.ref(storage, lambda _: self._known.pop(key, None)))
        return known

    def _touch(self, storage_state: _Spilled) -> None:
        storage_state.fill()
        self._known[storage_state.key] = self._known.pop(storage_state.key)

    def _put_away(self, besides: list[_Spilled]) -> None:
        held = sum(storage_state.held_bytes for storage_state in self._known.values())
        for storage_state in list(self._known.values()):
            if held <= self._in_memory:
                return
            if storage_state not in besides:
                held -= storage_state.held_bytes
                storage_state.put_away(self._make_room)


@final
class _Spilled:
    """One storage, in memory or spilled."""

    def __init__(self, key: int, storage: weakref.ref[torch.UntypedStorage]) -> None:
        self.key = key
        self._storage = storage
        self._room: Room | None = None
        self._bytes = self._held().nbytes()

    @property
    def held_bytes(self) -> int:
        storage = self._storage()
        return 0 if storage is None else storage.nbytes()

    def fill(self) -> None:
        storage = self._held()
        if storage.nbytes() == 0 and self._room is not None:
            storage.resize_(self._bytes)
            self._room.read(0, _as_bytes(storage))

    def put_away(self, make_room: Callable[[int], Room]) -> None:
        storage = self._storage()
        if storage is None or storage.nbytes() == 0:
            return
        if self._room is None or storage.nbytes() != self._bytes:
            self._bytes = storage.nbytes()
            self._room = make_room(self._bytes)
        self._room.write(0, _as_bytes(storage))
        storage.resize_(0)

    def _held(self) -> torch.UntypedStorage:
        storage = self._storage()
        assert storage is not None, "an operation holds the storages of its inputs"
        return storage


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _storages(*values: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [
        leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    ]
    storages = [leaf.untyped_storage() for leaf in tensors]
    return {id(storage): storage for storage in storages if storage.device.type == "cpu"}
