"""The sample of a trace: which of its sizes may vary, samples of other sizes made from it, and the check of a batch.

A trace runs the model at several sizes. Each dimension of the sample's tensors belongs to a `Size`: equal sizes vary
together, such as the lengths of token ids and their mask; dimension 0 is the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.errors import ConfigError
from gpipe_cli.pytree import element, flatten, paths, plain_values, unflatten
from gpipe_cli.values import POSITIONS


@final
@dataclass(frozen=True, slots=True)
class Size:
    """A number that dimensions of the inputs have in common."""

    index: int
    places: tuple[tuple[int, int], ...] = field(compare=False)
    """Tensors, by number, and dimensions that have it."""
    given: int = field(compare=False)
    """In the sample."""

    @property
    def is_batch(self) -> bool:
        return self.places[0][1] == 0


@final
@dataclass(frozen=True, slots=True)
class SampleArguments:
    """The arguments of a model, and the tensors among them by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: dict[str, Tensor]


@final
class TraceSample:
    """An input of a model: a tensor, a tuple of positional arguments, or a dict of keyword arguments."""

    def __init__(self, value: Any) -> None:
        self.tensors, self._template = flatten(value, "sample")
        if not self.tensors:
            raise ConfigError("the sample holds no tensor; give a tensor, a tuple or a dict with tensors")
        self.keys = tuple(value) if isinstance(value, dict) else None
        """The keys of a dict; None for another value."""
        self.constants = plain_values(self._template)
        """Arguments that are no tensors, which the trace fixes."""
        path_of = dict(reversed([*paths(self._template)]))
        self.paths = [path_of[place] for place in range(len(self.tensors))]
        """For each tensor the keys that lead to it."""
        self.names = [_name(path) for path in self.paths]
        self.sizes = self._find_sizes()

    def _find_sizes(self) -> list[Size]:
        """The batch, then all others in the order of their dimensions."""
        rows = next((len(tensor) for tensor in self.tensors if tensor.dim()), 0)
        places: dict[tuple[bool, int], list[tuple[int, int]]] = {(True, rows): []}
        for number, tensor in enumerate(self.tensors):
            for dimension, size in enumerate(tensor.shape):
                is_batch = dimension == 0 and size == rows
                places.setdefault((is_batch, size), []).append((number, dimension))
        return [Size(index, tuple(at), given) for index, ((_, given), at) in enumerate(places.items()) if at]

    def is_sequence(self, size: Size) -> bool:
        """Whether it is a number of tokens: a dimension of whole numbers."""
        return any(not self.tensors[number].is_floating_point() for number, _ in size.places)

    def resized(self, sizes: Mapping[Size, int], other_dtype: bool = False) -> SampleArguments:
        """The sample at these sizes, with padding; a size that is not named stays as it is."""
        tensors = list(self.tensors)
        for size, wanted in sizes.items():
            for number, dimension in size.places:
                tensors[number] = _resized(tensors[number], dimension, wanted)
        tensors = [_padded(name, tensor) for name, tensor in zip(self.names, tensors, strict=True)]
        return self._inputs([in_other_dtype(tensor) for tensor in tensors] if other_dtype else tensors)

    def other_masks(self) -> Iterator[SampleArguments]:
        """The sample without padding, with padding on the left, and with half of every row padded."""
        if not self.masks:
            return
        for first, last in ((0.0, 1.0), (0.3, 1.0), (0.0, 0.5)):
            tensors = [
                _mask(name, tensor, first, last) if name in self.masks else tensor
                for name, tensor in zip(self.names, self.tensors, strict=True)
            ]
            yield self._inputs(tensors)

    def value_of(self, inputs: SampleArguments) -> Any:
        """The input of a sequence, of the sample's kind."""
        return unflatten(self._template, list(inputs.tensors.values()))

    @property
    def masks(self) -> set[str]:
        return {name for name, tensor in zip(self.names, self.tensors, strict=True) if _is_mask(name, tensor)}

    def _inputs(self, tensors: list[Tensor]) -> SampleArguments:
        tensors = [tensor.clone() for tensor in tensors]  # a forward may write to its inputs
        value = unflatten(self._template, tensors)
        args, kwargs = (
            ((), value) if isinstance(value, dict) else (value if isinstance(value, tuple) else (value,), {})
        )
        return SampleArguments(args, kwargs, dict(zip(self.names, tensors, strict=True)))


def shapes_of(tensors: Iterable[Tensor]) -> str:
    return " and ".join("x".join(map(str, tensor.shape)) for tensor in tensors)


def _name(path: tuple[Any, ...]) -> str:
    is_argument = bool(path) and isinstance(path[0], str)
    return element(path[0], path[1:]) if is_argument else element("input", path)


def in_other_dtype(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    other = tensor.to(torch.float64 if tensor.dtype != torch.float64 else torch.float32)
    return (
        torch.nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else other
    )


def _resized(tensor: Tensor, dimension: int, size: int) -> Tensor:
    """Repeat or drop entries of a dimension."""
    if tensor.shape[dimension] in (0, size):
        return tensor
    last = tensor.shape[dimension] - 1
    entries = torch.arange(size, device=tensor.device) % max(1, last)
    entries[-1] = last  # a sequence keeps the token that ends it
    return tensor.index_select(dimension, entries)


def _padded(name: str, tensor: Tensor) -> Tensor:
    """Give a mask without padding some, and positions another document: models skip masks that would hide nothing."""
    if not _is_mask(name, tensor) or tensor.is_meta or tensor.shape[1] < 2:
        return tensor
    hides_something = (tensor.diff() != 1).any() if _are_positions(name) else not tensor.all()
    if hides_something:
        return tensor
    padded = tensor.clone()
    padded[0, -1] = 0
    return padded


def _mask(name: str, tensor: Tensor, first: float, last: float) -> Tensor:
    """A mask that pads all but a part of every row, given as fractions of its length; positions for which that part
    is a document, as are those before and after it."""
    length = tensor.shape[1]
    begin, end = int(first * length), math.ceil(last * length)
    places = torch.arange(length, device=tensor.device)
    kept = (places >= begin) & (places < end)
    if _are_positions(name):
        kept = places - torch.where(places >= end, end, begin * kept)
    return kept.to(tensor.dtype).expand_as(tensor).contiguous()


def _is_mask(name: str, tensor: Tensor) -> bool:
    """Whether models compute from it which tokens see each other: positions that begin again tell documents apart."""
    return (
        (name.endswith("mask") or _are_positions(name))
        and tensor.dim() == 2
        and not tensor.is_floating_point()
    )


def _are_positions(name: str) -> bool:
    return name == POSITIONS


@final
@dataclass(frozen=True, slots=True)
class Range:
    """The sizes that a trace is verified for; a fixed size has equal bounds."""

    least: int
    most: int | None

    def __contains__(self, size: int) -> bool:
        return self.least <= size and (self.most is None or size <= self.most)


@final
@dataclass(frozen=True, slots=True)
class InputCheck:
    """Refuses a batch that the traced layers would compute something else for than the model."""

    keys: tuple[Any, ...] | None
    names: tuple[str, ...]
    constants: tuple[Any, ...]
    places: tuple[tuple[Range, tuple[tuple[int, int], ...]], ...]
    """For each size that matters its range, and where it is."""

    def __call__(self, value: Any) -> None:
        if self.keys is not None and isinstance(value, dict):
            if set(value) != set(self.keys):
                raise ValueError(
                    f"the batch has {_listed(value)}, but the model was traced with {_listed(self.keys)}; "
                    "give the same keys"
                )
            value = {key: value[key] for key in self.keys}
        tensors, template = flatten(value, "input")
        if len(tensors) != len(self.names):
            raise ValueError(
                f"the batch has {len(tensors)} tensors, but the model was traced with {len(self.names)} "
                f"({_listed(self.names)})"
            )
        constants = tuple(plain_values(template))
        if repr(constants) != repr(self.constants):  # 1, 1.0 and True are equal, but not the same to a model
            raise ValueError(
                f"the batch has {_listed(constants)} beside its tensors, but the model was traced with "
                f"{_listed(self.constants)}; trace it with the same"
            )
        for allowed, places in self.places:
            first: int | None = None
            for number, dimension in places:
                size = tensors[number].size(dimension)
                if size in allowed and first in (None, size):
                    first = size
                    continue
                where = f"dimension {dimension} of {self.names[number]}"
                raise ValueError(_size_error(where, size, allowed, first, is_batch=dimension == 0))


def _size_error(where: str, size: int, allowed: Range, other: int | None, is_batch: bool) -> str:
    if size not in allowed:
        sizes = f"from {allowed.least} to {allowed.most}"
        if allowed.most is None:
            sizes = f"of at least {allowed.least}"
        elif allowed.least == allowed.most:
            sizes = f"of {allowed.least}"
        hint = "use larger micro-batches" if is_batch else f"trace it with a sample of size {size}"
        return f"{where} is {size}, but the model was traced for sizes {sizes}; {hint}"
    return (
        f"{where} is {size} where another one is {other}, but both were equal when the model was traced; trace it with "
        "a sample in which they differ"
    )


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
