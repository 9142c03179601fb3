"""Merge the graphs of training and evaluation into one where they differ only in the value of `training`.

In F.dropout(x, p, self.training) one graph has True and the other False. In the merged graph a read of the owner's
`training` takes that place, so that the layer looks it up when it runs. Graphs that differ otherwise are not merged.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate


def merge_modes(training: fx.Graph, evaluation: fx.Graph, clone: nn.Module) -> fx.Graph | None:
    """Change the training graph so that it serves both modes; return None if the graphs differ otherwise."""
    if len(training.nodes) != len(evaluation.nodes):
        return None
    counterparts = dict(zip(training.nodes, evaluation.nodes, strict=True))
    if not all(_are_alike(node, other, counterparts, clone) for node, other in counterparts.items()):
        return None
    for node, other in counterparts.items():
        if any(_are_opposite(*pair) for pair in zip(_arguments(node), _arguments(other), strict=True)):
            _read_training(node, other)
    return training


def _are_alike(node: fx.Node, other: fx.Node, counterparts: dict[fx.Node, fx.Node], clone: nn.Module) -> bool:
    if node.op != other.op or _argument_structure(node) != _argument_structure(other):
        return False
    if node.target != other.target and not _are_equal_constants(node, other, clone):
        return False
    return all(
        counterparts.get(left) is right
        if isinstance(left, fx.Node)
        else left == right or _are_opposite(left, right)
        for left, right in zip(_arguments(node), _arguments(other), strict=True)
    )


def _are_equal_constants(node: fx.Node, other: fx.Node, clone: nn.Module) -> bool:
    """Compare tensors that the forward itself creates: each trace stores them on the clone under a new name."""
    if node.op != "get_attr":
        return False
    left, right = (getattr(clone, str(read.target), None) for read in (node, other))
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    return left.dtype == right.dtype and not left.is_meta and not right.is_meta and torch.equal(left, right)


def _are_opposite(left: object, right: object) -> bool:
    return isinstance(left, bool) and isinstance(right, bool) and left != right


def _read_training(node: fx.Node, other: fx.Node) -> None:
    """Replace each argument that is True in one mode only by a read of `training`, or of its negation.

    The owner of that `training` is the module in whose forward the node was recorded.
    """
    stack = node.meta.get("nn_module_stack") or {}
    owner, _ = next(reversed(stack.values()), ("", None))
    with node.graph.inserting_before(node):
        training = node.graph.get_attr(f"{owner}.training" if owner else "training")
        evaluating = node.graph.call_function(operator.not_, (training,))
    other_arguments = iter(_arguments(other))

    def replace(argument: Any) -> Any:
        if not _are_opposite(argument, next(other_arguments)):
            return argument
        return training if argument else evaluating

    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), replace)
    if not evaluating.users:
        node.graph.erase_node(evaluating)


def _arguments(node: fx.Node) -> list[Any]:
    """All arguments in order, flattened out of lists, dicts and slices."""
    arguments: list[Any] = []
    map_aggregate((node.args, node.kwargs), arguments.append)
    return arguments


def _argument_structure(node: fx.Node) -> Any:
    """The lists, dicts and slices of the arguments with None in place of every value."""
    return map_aggregate((node.args, node.kwargs), lambda _: None)
