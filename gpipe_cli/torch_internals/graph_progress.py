"""How far a backward came before it failed: which nodes were made when, and which have already run.

torch numbers the nodes of a graph as they are made, in each thread, and its engine frees what a node saved as soon
as the node has run. Both can be seen through private names only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = Any
"""torch.autograd.graph.Node, whose stubs do not know the attributes of its kinds."""


_PythonFunction = torch.autograd.function.BackwardCFunction

next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node made in this thread will have."""


def number_of(node: Node) -> int:
    return int(node._sequence_nr())


def has_run(node: Node) -> bool | None:
    """Whether what the node saved is gone; None for a node that saves no tensor."""
    words = complaint(node)
    if words:
        return "a second time" in words
    if isinstance(node, _PythonFunction):
        return False if node.saved_tensors else None
    return False if _saved(node) else None


def complaint(node: Node) -> str:
    """What the node would say if it were run now: that what it saved was freed, or written in place since."""
    for name in _saved(node):
        try:
            getattr(node, name)
        except RuntimeError as error:
            return str(error)
    return ""


def _saved(node: Node) -> list[str]:
    """The attributes that give what the node saved; a Python function has one for all its tensors."""
    if isinstance(node, _PythonFunction):
        return ["saved_tensors"]
    return [name.removeprefix("_raw") for name in dir(node) if name.startswith("_raw_saved_")]


def nodes_behind(nodes: Sequence[Node]) -> Iterator[Node]:
    """The nodes of the graph that begins with `nodes`, once each."""
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(following for following, _ in node.next_functions if following is not None)


def saved_behind(nodes: Sequence[Node]) -> Iterator[Tensor]:
    """What the nodes of the graph that begins with `nodes` saved, as far as no hook has put it elsewhere."""
    for node in nodes_behind(nodes):
        for name in _saved(node):
            # A tensor that was written in place cannot be had; its node will say so in backward.
            saved = None
            with contextlib.suppress(RuntimeError):
                saved = getattr(node, name)
            members = saved if isinstance(saved, tuple | list) else [saved]
            yield from (member for member in members if isinstance(member, Tensor))
