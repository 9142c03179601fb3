"""The autograd graph: its nodes, how far a backward has come, and what the running backward was asked for.

torch numbers the nodes of a graph as they are created, in each thread, and its engine frees what a node saved as soon
as the node has run. torch tells its own checkpointing what a backward was asked for through private functions; the
autograd function over a pipe needs to know as well.
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


def keeps_graph() -> bool:
    """Whether the backward running in this thread was given retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def fills_leaf(leaf: Tensor) -> bool:
    """Whether the backward running in this thread reaches `leaf`: autograd.grad and inputs= leave leaves
    out.
    """
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    return bool(torch._C._will_engine_execute_node(node))


def is_asked_for(leaf: Tensor) -> bool:
    """Whether the running backward was given `leaf` in inputs=, or is an autograd.grad of it."""
    return is_captured(leaf) or fills_leaf(leaf)


def is_captured(leaf: Tensor) -> bool:
    """Whether the running backward is an autograd.grad of `leaf`."""
    try:
        fills_leaf(leaf)
    except RuntimeError:
        # What torch answers for a leaf that autograd.grad captures, and for no other.
        return True
    return False


def has_hooks(leaf: Tensor) -> bool:
    """Whether anything runs when a gradient reaches `leaf`."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


@contextlib.contextmanager
def without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Inside, a gradient that reaches one of `leaves` runs no hook."""
    removed = [(leaf._backward_hooks, dict(leaf._backward_hooks)) for leaf in leaves if leaf._backward_hooks]
    # torch looks into these dictionaries, so they are emptied and not replaced.
    for hooks, _ in removed:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in removed:
            hooks.update(before)
