"""The graphs of training and evaluation as one, where they differ in nothing but what `training` is.

F.dropout(x, p, self.training) is True in one and False in the other: a read of the owner's `training` takes
its place, so that it is looked at when the layer runs. Where the two differ in more there is no such graph.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

__all__ = ["unified"]


def unified(training: fx.Graph, evaluation: fx.Graph, clone: nn.Module) -> fx.Graph | None:
    """That of training, made to serve both modes; None if they do not do the same."""
    if len(training.nodes) != len(evaluation.nodes):
        return None
    matches = dict(zip(training.nodes, evaluation.nodes, strict=True))
    if not all(_are_alike(ours, theirs, matches, clone) for ours, theirs in matches.items()):
        return None
    for ours, theirs in matches.items():
        if any(_are_opposite(*pair) for pair in zip(_arguments(ours), _arguments(theirs), strict=True)):
            _read_training(ours, theirs)
    return training


def _are_alike(ours: fx.Node, theirs: fx.Node, matches: dict[fx.Node, fx.Node], clone: nn.Module) -> bool:
    if ours.op != theirs.op or _form(ours) != _form(theirs):
        return False
    if ours.target != theirs.target and not _are_equal_constants(ours, theirs, clone):
        return False
    pairs = zip(_arguments(ours), _arguments(theirs), strict=True)
    return all(
        matches.get(one) is other if isinstance(one, fx.Node) else one == other or _are_opposite(one, other)
        for one, other in pairs
    )


def _are_equal_constants(ours: fx.Node, theirs: fx.Node, clone: nn.Module) -> bool:
    """A tensor made by the forward itself gets a new name in each trace."""
    if ours.op != "get_attr":
        return False
    one, other = (getattr(clone, str(node.target), None) for node in (ours, theirs))
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return one.dtype == other.dtype and not one.is_meta and not other.is_meta and torch.equal(one, other)


def _are_opposite(one: object, other: object) -> bool:
    return isinstance(one, bool) and isinstance(other, bool) and one != other


def _read_training(node: fx.Node, other: fx.Node) -> None:
    """Replace what is True in one mode only by a read at the module in whose forward the node was made."""
    stack = node.meta.get("nn_module_stack") or {}
    owner, _ = next(reversed(stack.values()), ("", None))
    with node.graph.inserting_before(node):
        training = node.graph.get_attr(f"{owner}.training" if owner else "training")
        evaluating = node.graph.call_function(operator.not_, (training,))
    others = iter(_arguments(other))

    def read(argument: Any) -> Any:
        if not _are_opposite(argument, next(others)):
            return argument
        return training if argument else evaluating

    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), read)
    if not evaluating.users:
        node.graph.erase_node(evaluating)


def _arguments(node: fx.Node) -> list[Any]:
    """All of them, one after the other, however deep in lists they are."""
    found: list[Any] = []
    map_aggregate((node.args, node.kwargs), found.append)
    return found


def _form(node: fx.Node) -> Any:
    """The arguments' lists, dicts and slices, with nothing in them."""
    return map_aggregate((node.args, node.kwargs), lambda _: None)
