"""Values made of tensors: any nesting of tuples, lists, dicts and namedtuples, with plain values beside the tensors.

`flatten` takes a value apart into its distinct tensors and a template, from which `unflatten` builds it again with
other tensors. A tensor that occurs twice in a value stays one tensor. A mapping that is no dict, such as the
BatchEncoding of a Hugging Face tokenizer, is built again as a dict.
"""

from __future__ import annotations

import copy
import enum
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

ModelInput: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a model takes: one argument, several positional ones, or keyword arguments."""

_PLAIN = (
    type(None),
    numbers.Number,
    str,
    bytes,
    range,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)
"""Types of immutable values without tensors, which all micro-batches may share."""


@final
@dataclass(frozen=True, slots=True)
class _Plain:
    """A value that is no tensor and is stored in the template."""

    value: Any


@final
@dataclass(frozen=True, slots=True)
class _Container:
    kind: type
    keys: tuple[Any, ...]
    """Keys of a dict; empty for other containers."""
    members: tuple[Template, ...]
    outline: Any = field(default=None, compare=False)
    """An instance of a dict subclass without its tensors. Copying it keeps its other attributes."""

    def build(self, tensors: Sequence[Tensor]) -> Any:
        members = [unflatten(member, tensors) for member in self.members]
        if self.kind is tuple:
            return tuple(members)
        if self.outline is not None:
            built = copy.copy(self.outline)
            for key, member in zip(self.keys, members, strict=True):
                built[key] = member
            return built
        if issubclass(self.kind, dict):
            return self.kind(zip(self.keys, members, strict=True))
        if hasattr(self.kind, "_fields"):
            return self.kind(*members)
        made: Any = self.kind
        return made(members)


Template: TypeAlias = int | _Plain | _Container
"""How to build a value from its tensors; an int is the place of a tensor."""

SINGLE = 0
"""The template of a bare tensor."""


def flatten(value: Any, what: str) -> tuple[tuple[Tensor, ...], Template]:
    """The distinct tensors of `value` and its template. A TypeError names the element of `what` that is not allowed."""
    if isinstance(value, Tensor):
        return (value,), SINGLE
    return flatten_with(value, what, lambda member: member if isinstance(member, Tensor) else None)


def flatten_with(
    value: Any, what: str, tensor_of: Callable[[Any], Tensor | None]
) -> tuple[tuple[Tensor, ...], Template]:
    """The same, where `tensor_of` decides which members count as tensors."""
    flattening = _Flattening(what, tensor_of)
    template = flattening.template(value, ())
    return tuple(flattening.tensors), template


def unflatten(template: Template, tensors: Sequence[Tensor]) -> Any:
    if isinstance(template, int):
        return tensors[template]
    return template.value if isinstance(template, _Plain) else template.build(tensors)


def plain_values(template: Template) -> list[Any]:
    """What a value holds besides tensors, in order."""
    if isinstance(template, _Container):
        return [value for member in template.members for value in plain_values(member)]
    return [template.value] if isinstance(template, _Plain) else []


def paths(template: Template, path: tuple[Any, ...] = ()) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the place of each tensor, with the keys that lead to it; a tensor that occurs twice comes twice."""
    if isinstance(template, int):
        yield template, path
    elif isinstance(template, _Container):
        for key, member in zip(template.keys or range(len(template.members)), template.members, strict=True):
            yield from paths(member, (*path, key))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with each tensor replaced by `function(tensor)`."""
    tensors, template = flatten(value, "value")
    return unflatten(template, [function(tensor) for tensor in tensors])


@final
class _Flattening:
    def __init__(self, what: str, tensor_of: Callable[[Any], Tensor | None]) -> None:
        self._what = what
        self._tensor_of = tensor_of
        self._places: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def template(self, value: Any, path: tuple[Any, ...]) -> Template:
        tensor = self._tensor_of(value)
        if tensor is not None:
            place = self._places.setdefault(id(tensor), len(self.tensors))
            if place == len(self.tensors):
                self.tensors.append(tensor)
            return place
        if isinstance(value, _PLAIN):
            return _Plain(value)
        if isinstance(value, tuple | list):
            members = (self.template(member, (*path, place)) for place, member in enumerate(value))
            return _Container(type(value), (), tuple(members))
        if isinstance(value, dict):
            members = (self.template(member, (*path, key)) for key, member in value.items())
            return _Container(type(value), tuple(value), tuple(members), _outline(value))
        if isinstance(value, Mapping):
            return self.template(dict(value), path)
        raise TypeError(f"expected Tensor, but got {type(value).__name__} as {element(self._what, path)}")


def _outline(value: dict[Any, Any]) -> dict[Any, Any] | None:
    """A copy of an instance of a dict subclass, without tensors."""
    if type(value) is dict:
        return None
    outline = copy.copy(value)
    for key in outline:
        outline[key] = None
    return outline


def element(what: str, path: Sequence[Any]) -> str:
    """The path to a member of a value: output[1]['mask']."""
    return what + "".join(f"[{key!r}]" for key in path)
