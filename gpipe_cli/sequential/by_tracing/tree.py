"""Containers that a forward passes around: tuples, lists, dicts, slices and, in outputs, objects with attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

_WITHOUT_TENSORS = frozenset({bool, float, int, str, type(None), torch.Size, torch.device, torch.dtype})
"""Most arguments are of these types, so they are looked at first."""


@final
class FieldName(str):
    """The name of a field of a dataclass, as opposed to a key of a dict."""


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Replace every leaf; a torch.Size becomes a tuple, and a dict of any kind a plain one."""
    if isinstance(tree, tuple):
        members = [map_tree(function, member) for member in tree]
        return type(tree)(*members) if hasattr(tree, "_fields") else tuple(members)
    if isinstance(tree, list):
        return [map_tree(function, member) for member in tree]
    if isinstance(tree, dict):
        return {key: map_tree(function, member) for key, member in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_tree(function, bound) for bound in (tree.start, tree.stop, tree.step)))
    return function(tree)


def leaves_of(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    map_tree(leaves.append, tree)
    return leaves


def structure_of(tree: Any) -> Any:
    """The containers with None in place of every leaf, to compare."""
    return map_tree(lambda _: None, tree)


def tensors_in(tree: Any) -> list[Tensor]:
    return [tensor for _, tensor in located_tensors(tree)]


def located_tensors(tree: Any) -> list[tuple[tuple[Any, ...], Tensor]]:
    """Each tensor and where it is: keys of containers, and names of a dataclass's fields."""
    located: list[tuple[tuple[Any, ...], Tensor]] = []
    _collect(tree, (), located)
    return located


def _collect(tree: Any, access: tuple[Any, ...], located: list[tuple[tuple[Any, ...], Tensor]]) -> None:
    if type(tree) in _WITHOUT_TENSORS:
        return
    if isinstance(tree, Tensor):
        located.append((access, tree))
    elif isinstance(tree, tuple | list):
        for index, member in enumerate(tree):
            _collect(member, (*access, index), located)
    elif isinstance(tree, dict):
        for key, member in tree.items():
            _collect(member, (*access, key), located)
    elif isinstance(tree, slice):
        _collect((tree.start, tree.stop, tree.step), access, located)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            _collect(getattr(tree, field.name), (*access, FieldName(field.name)), located)
