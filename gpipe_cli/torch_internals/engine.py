"""Backward without the checks that `torch.autograd.backward` makes in Python on every call.

A pipe runs one backward per action from edges it took itself, with gradients that fit them: the checks
could find nothing and cost as much as the engine needs to start. Uses torch's private entry to its engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd import Variable
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
    inputs: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`, which are added to no leaf."""
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
