"""torch's autograd engine without the checks of its public entry points, and the graph it runs over.

A pipe runs one backward per action from edges it took itself, with gradients that fit them. The checks that torch's
public functions make in Python could find nothing, and would cost as much as the engine needs to start. torch numbers
the nodes of a graph as they are created, in each thread, and its engine frees what a node saved as soon as the node has
run. torch tells its own checkpointing what a backward was asked for through private functions; the autograd function
over a pipe needs to know as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function, Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from gpipe_cli.torch_internals.tensors import is_view


def run_backward(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    *,
    keep_graph: bool,
    inputs: Sequence[Tensor] = (),
) -> None:
    """Add gradients to all leaves, or only to `inputs` if there are any."""
    Variable._execution_engine.run_backward(
        tuple(roots),
        tuple(gradients),
        keep_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def capture_gradients(
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    *,
    keep_graph: bool,
    inputs: Sequence[Tensor | GradientEdge],
) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`, before hooks change them. No `.grad` changes."""
    captured: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(
        tuple(roots),
        tuple(gradients),
        keep_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return captured


def apply(function: type[Function], *arguments: Any) -> Any:
    return super(Function, function).apply(*arguments)  # type: ignore[misc]


Node: TypeAlias = Any
"""torch.autograd.graph.Node, whose stubs do not know the attributes of its kinds."""


_PythonFunction = torch.autograd.function.BackwardCFunction

next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the next node that this thread creates."""


def number_of(node: Node) -> int:
    return int(node._sequence_nr())


def has_run(node: Node) -> bool | None:
    """Whether what the node saved has been freed; None for a node that saves no tensor."""
    message = saved_tensor_error(node)
    if message:
        return "a second time" in message
    if isinstance(node, _PythonFunction):
        return False if node.saved_tensors else None
    return False if _saved(node) else None


def saved_tensor_error(node: Node) -> str:
    """The error that the node would raise if it ran now: a saved tensor was freed, or written in place."""
    for name in _saved(node):
        try:
            getattr(node, name)
        except RuntimeError as error:
            return str(error)
    return ""


def _saved(node: Node) -> list[str]:
    """The names of the attributes with saved tensors; a Python function has one for all of them."""
    if isinstance(node, _PythonFunction):
        return ["saved_tensors"]
    return [name.removeprefix("_raw") for name in dir(node) if name.startswith("_raw_saved_")]


def graph_behind(tensor: Tensor) -> Node:
    """The node that a tensor comes from, or that of its base for a view.

    Asking a stale view for its own node would create the node now, and change the order in which gradients add up.
    """
    return (tensor if tensor._base is None else tensor._base).grad_fn


def is_stale_view(tensor: Tensor) -> bool:
    """Whether the tensor is a view whose base was written since; asking for its node makes autograd create one."""
    number = next_number()
    return is_view(tensor) and tensor.grad_fn is not None and number_of(tensor.grad_fn) >= number


def is_python_function(node: Node) -> bool:
    """Whether the node is that of a torch.autograd.Function."""
    return isinstance(node, _PythonFunction)


def node_type(function: type[torch.autograd.Function]) -> type:
    """The type of the nodes that a function leaves in a graph."""
    kind: type = function._backward_cls
    return kind


ACCUMULATE_GRAD = type(get_gradient_edge(torch.zeros(0, requires_grad=True)).node)
"""The type of the nodes that stand for leaves."""


def is_reentrant_checkpoint(node: Node) -> bool:
    return isinstance(node, node_type(CheckpointFunction))


def output_edges(node: Node) -> list[GradientEdge]:
    """Where gradients arrive at the node: one edge for each output that it had in the forward."""
    return [GradientEdge(node, place) for place in range(len(node._input_metadata))]


def nodes_behind(nodes: Sequence[Node]) -> Iterator[Node]:
    """The nodes of the graph that begins with `nodes`, once each."""
    visited: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in visited:
            visited.add(node)
            yield node
            stack.extend(following for following, _ in node.next_functions if following is not None)


def keeps_graph() -> bool:
    """Whether the backward running in this thread has retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def fills_leaf(leaf: Tensor) -> bool:
    """Whether the backward running in this thread reaches `leaf`: autograd.grad and inputs= skip some leaves."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    return bool(torch._C._will_engine_execute_node(node))


def has_hooks(leaf: Tensor) -> bool:
    """Whether anything runs when a gradient reaches `leaf`."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
