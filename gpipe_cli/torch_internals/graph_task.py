"""What the running backward was asked for: to keep the graph, to fill leaves.

torch tells its own checkpointing these things through private functions; a bridge needs them as much.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


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
