"""What makes `loss.backward()` run the pipe's backward: one autograd function over the whole pipe.

Decides how the output's gradients are cut into micro-batches, how the input's are joined, and which kinds
of backward are possible. Knows nothing of partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from gpipe_cli.pipeline.boundary import ANCHOR, Gradients, Parcel
from gpipe_cli.pipeline.flight import Flight
from gpipe_cli.pipeline.microbatch import Value, gather, tensors_of, value_like
from gpipe_cli.torch_internals.graph_task import fills_leaf, keeps_graph

__all__ = ["bridge", "joined_input_gradients"]

RunBackward = Callable[[Flight, list[Gradients], bool, bool], None]
"""Runs the backward of a flight: its output's gradients, whether to keep graphs, whether parameters count."""


def bridge(flight: Flight, inputs: Sequence[Tensor], run_backward: RunBackward) -> Value:
    """The flight's joined output, attached to `inputs` as one node of the caller's graph."""
    parcels = [flight.outputs[index] for index in range(len(flight.micro_batches))]
    output = gather([parcel.value for parcel in parcels])
    needs_grad = [any(column) for column in zip(*(parcel.needs_grad for parcel in parcels), strict=True)]
    if not any(needs_grad):
        return output
    # The flight lives as long as the output's graph; nothing else may keep the outputs of its micro-batches.
    flight.outputs.clear()
    crossing = _Crossing(flight, run_backward, needs_grad, [_rows(parcel) for parcel in parcels])
    tensors = _Bridge.apply(crossing, tensors_of(output), ANCHOR, *inputs)  # type: ignore[no-untyped-call]
    return value_like(output, tensors)


@final
@dataclass(frozen=True, slots=True)
class _Crossing:
    """What the backward needs to know of the forward."""

    flight: Flight
    run_backward: RunBackward
    needs_grad: list[bool]
    rows: list[list[int]]
    """By micro-batch and output tensor."""


def _rows(parcel: Parcel) -> list[int]:
    return [tensor.size(0) for tensor in parcel.tensors if tensor is not None and tensor.dim() > 0]


@final
class _Bridge(Function):
    @staticmethod
    def forward(
        ctx: Any, crossing: _Crossing, outputs: tuple[Tensor, ...], anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        outputs = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(
            *(output for output, needed in zip(outputs, crossing.needs_grad, strict=True) if not needed)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True cannot go through a pipe: its partitions' graphs are cut at their borders"
            )
        crossing: _Crossing = ctx.crossing
        shares = _cut(gradients, crossing.rows)
        crossing.run_backward(crossing.flight, shares, keeps_graph(), fills_leaf(ANCHOR))
        return (None, None, None, *joined_input_gradients(crossing.flight))


def _cut(gradients: tuple[Tensor | None, ...], rows: list[list[int]]) -> list[Gradients]:
    """Each micro-batch's share of the output's gradients."""
    if len(rows) == 1:
        return [gradients]
    columns = [
        [None] * len(rows) if gradient is None else torch.split(gradient, [row[place] for row in rows])
        for place, gradient in enumerate(gradients)
    ]
    return list(zip(*columns, strict=True))


def joined_input_gradients(flight: Flight) -> Gradients:
    """The gradients of the whole input; None for a tensor that no micro-batch gave any."""
    pieces = [flight.input_gradients.pop(index) for index in range(len(flight.micro_batches))]
    inputs = [parcel.tensors for parcel in flight.inputs]
    return tuple(
        _join(gradients, tensors)
        for gradients, tensors in zip(zip(*pieces, strict=True), zip(*inputs, strict=True), strict=True)
    )


def _join(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> Tensor | None:
    if all(gradient is None for gradient in gradients):
        return None
    filled = [
        torch.zeros_like(tensor) if gradient is None and tensor is not None else gradient
        for gradient, tensor in zip(gradients, tensors, strict=True)
    ]
    present = [gradient for gradient in filled if gradient is not None]
    return present[0] if len(present) == 1 else torch.cat(present)
