"""torch's autograd engine and functions without the checks that their public entry points make in Python.

A pipe runs one backward per action from edges it took itself, with gradients that fit them. The checks could find
nothing and would cost as much as the engine needs to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function, Variable
from torch.autograd.graph import GradientEdge


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
