"""Operations on large tensors, recorded so that any one of the tensors can be computed later, and only that one.

Uses `torch.utils._pytree`, which torch keeps private.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
EMPTIES = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
"""Operations that make a tensor without values."""
FILLS = frozenset(
    {
        _aten.bernoulli_,
        _aten.cauchy_,
        _aten.copy_,
        _aten.exponential_,
        _aten.fill_,
        _aten.geometric_,
        _aten.log_normal_,
        _aten.normal_,
        _aten.random_,
        _aten.uniform_,
        _aten.zero_,
    }
)
"""Operations that give a tensor new values without reading those it had."""
MODELLED = frozenset(
    {
        _aten.empty_like,
        _aten.full_like,
        _aten.new_empty,
        _aten.new_empty_strided,
        _aten.new_full,
        _aten.new_ones,
        _aten.new_zeros,
        _aten.ones_like,
        _aten.rand_like,
        _aten.randint_like,
        _aten.randn_like,
        _aten.zeros_like,
    }
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
class Step:
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
        """Of each key."""
        self._steps: list[Step] = []
        self._writers: list[list[int]] = []
        """For each key, the steps that make or change the tensor."""

    def add(self, nbytes: int) -> int:
        """The key of a new tensor."""
        self.nbytes.append(nbytes)
        self._writers.append([])
        return len(self.nbytes) - 1

    def record(self, step: Step, changed: Iterable[int]) -> None:
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

    def _reads(self, step: Step) -> set[int]:
        """The tensors whose values before the step decide what they or others have after it."""
        first = step.args[0] if step.args else None
        packet = step.func.overloadpacket
        is_unread = isinstance(first, View) and (
            packet in MODELLED or (packet in FILLS and self.is_whole(first))
        )
        others = tree_leaves((step.args[1:] if is_unread else step.args, step.kwargs))
        return {leaf.key for leaf in others if isinstance(leaf, View)}
