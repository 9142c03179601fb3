"""Tensors whose values are computed later: what transformers does with them while it loads a model is recorded.

Between files and modules, transformers renames, splits, stacks and transposes tensors. It gets `DeferredTensor`s
instead of the tensors in the files. They are on the meta device, so loading a model this way reads nothing, and each
parameter ends up as a tensor that knows from which tensors of the files its value is to be computed, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor


class DeferredTensor(Tensor):  # not final: torch makes it an nn.Parameter by an attribute
    compute: Callable[[], Tensor]
    """Reads and computes the value."""
    sources: frozenset[str]
    """The names, in the files, of the tensors that the value depends on."""

    @staticmethod
    def of(
        shape: Sequence[int], dtype: torch.dtype, name: str, compute: Callable[[], Tensor]
    ) -> DeferredTensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(DeferredTensor)
        tensor.compute, tensor.sources = compute, frozenset({name})
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        # Before the call: a function that works in place returns one of its arguments.
        arguments = _later(args, named)
        sources = frozenset().union(*(tensor.sources for tensor in _deferred([*args, *named.values()])))
        result = super().__torch_function__(func, types, args, named)  # type: ignore[no-untyped-call]

        def value() -> Any:
            positional, by_name = arguments()
            return func(*positional, **by_name)

        several = isinstance(result, tuple | list)
        for index, output in enumerate(result if several else [result]):
            if isinstance(output, DeferredTensor):
                output.compute = _member(value, index) if several else value
                output.sources = sources
        return result


@final
class StoredTensor:
    """A tensor in a file, with the methods of safetensors' slices that transformers calls."""

    def __init__(self, name: str, outline: Tensor, read: Callable[[], Tensor], file: Path) -> None:
        self.name, self._outline, self._read, self.file = name, outline, read, file

    @property
    def shape(self) -> torch.Size:
        return self._outline.shape

    def __getitem__(self, index: Any) -> StoredTensor:
        assert index is Ellipsis, "transformers reads whole tensors"
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> DeferredTensor:
        """Of this dtype; on no device yet."""
        read, kind = self._read, dtype or self._outline.dtype
        return DeferredTensor.of(self.shape, kind, self.name, lambda: read().to(kind))


def _member(value: Callable[[], Any], index: int) -> Callable[[], Tensor]:
    return lambda: value()[index]


def _later(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], tuple[list[Any], dict[str, Any]]]:
    """The arguments with the values of deferred tensors, which are computed when this is called."""
    positional, named = [_value(item) for item in args], {key: _value(item) for key, item in kwargs.items()}
    return lambda: ([item() for item in positional], {key: item() for key, item in named.items()})


def _value(item: Any) -> Callable[[], Any]:
    if isinstance(item, DeferredTensor):
        return item.compute
    if isinstance(item, tuple | list):
        kind, members = type(item), [_value(member) for member in item]
        return lambda: kind(member() for member in members)
    return lambda: item


def _deferred(items: Iterable[Any]) -> Iterator[DeferredTensor]:
    for item in items:
        if isinstance(item, DeferredTensor):
            yield item
        elif isinstance(item, tuple | list):
            yield from _deferred(item)
