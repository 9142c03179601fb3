"""The graphs of training and evaluation as one, where they differ in nothing but what `training` is.

F.dropout(x, p, self.training) is True in one and False in the other: a read of the owner's `training` takes
its place, so that it is looked at when the layer runs. Where the two differ in more there is no such graph.
"""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import torch
from torch import fx, nn

__all__ = ["unified"]

Matches: TypeAlias = dict[fx.Node, fx.Node]


def unified(training: fx.Graph, evaluation: fx.Graph, clone: nn.Module) -> fx.Graph | None:
    """A graph for both modes; None if they do not do the same."""
    if len(training.nodes) != len(evaluation.nodes):
        return None
    matches: Matches = {}
    merged: list[tuple[fx.Node, Any]] = []
    for ours, theirs in zip(training.nodes, evaluation.nodes, strict=True):
        if ours.op != theirs.op or not _same_target(ours, theirs, clone):
            return None
        differences: list[bool] = []
        arguments = _merge((ours.args, ours.kwargs), (theirs.args, theirs.kwargs), matches, differences)
        if arguments is None:
            return None
        matches[ours] = theirs
        if differences:
            merged.append((ours, arguments))
    for node, arguments in merged:
        _read_training(training, node, arguments)
    return training


class _Different(Exception):
    pass


class _Training:
    """Stands in a node's arguments where `training`, or its opposite, is to be read."""

    def __init__(self, is_opposite: bool) -> None:
        self.is_opposite = is_opposite


def _same_target(ours: fx.Node, theirs: fx.Node, clone: nn.Module) -> bool:
    if ours.target == theirs.target:
        return True
    if ours.op == "output" or ours.op == "placeholder":
        return True
    if ours.op != "get_attr":
        return False
    # Constants get a new name in each trace.
    mine, other = (getattr(clone, str(node.target), None) for node in (ours, theirs))
    if not (isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return mine.dtype == other.dtype and not mine.is_meta and torch.equal(mine, other)


def _merge(ours: Any, theirs: Any, matches: Matches, differences: list[bool]) -> Any:
    try:
        return _merged(ours, theirs, matches, differences)
    except _Different:
        return None


def _merged(ours: Any, theirs: Any, matches: Matches, differences: list[bool]) -> Any:
    if isinstance(ours, fx.Node):
        if matches.get(ours) is not theirs:
            raise _Different
        return ours
    if type(ours) is not type(theirs):
        raise _Different
    if isinstance(ours, tuple | list):
        if len(ours) != len(theirs):
            raise _Different
        members = [
            _merged(mine, other, matches, differences) for mine, other in zip(ours, theirs, strict=True)
        ]
        return members if isinstance(ours, list) else tuple(members)
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            raise _Different
        return {key: _merged(ours[key], theirs[key], matches, differences) for key in ours}
    if isinstance(ours, slice):
        bounds = _merged(_bounds(ours), _bounds(theirs), matches, differences)
        return slice(*bounds)
    if isinstance(ours, bool) and ours != theirs:
        differences.append(ours)
        return _Training(is_opposite=not ours)
    if ours != theirs:
        raise _Different
    return ours


def _bounds(one: slice) -> tuple[Any, Any, Any]:
    return one.start, one.stop, one.step


def _read_training(graph: fx.Graph, node: fx.Node, arguments: Any) -> None:
    """Replace the stand-ins by reads of `training` at the module in whose forward the node was made."""
    stack = node.meta.get("nn_module_stack") or {}
    owner = next(reversed(stack.values()))[0] if stack else ""
    target = f"{owner}.training" if owner else "training"
    with graph.inserting_before(node):
        live = graph.get_attr(target)
        opposite: fx.Node | None = None

        def filled(value: Any) -> Any:
            nonlocal opposite
            if isinstance(value, _Training):
                if value.is_opposite and opposite is None:
                    opposite = graph.call_function(operator.not_, (live,))
                return opposite if value.is_opposite else live
            if isinstance(value, tuple | list):
                return type(value)(filled(member) for member in value)
            if isinstance(value, dict):
                return {key: filled(member) for key, member in value.items()}
            return value

        node.args, node.kwargs = filled(arguments)
