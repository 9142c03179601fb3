"""What makes `loss.backward()` run the pipe's backward: one autograd function over the whole pipe.

Decides how the output's gradients are cut into micro-batches, how the input's are joined, and which kinds
of backward are possible. Knows nothing of partitions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gpipe_cli.pipeline.boundary import ANCHOR, Gradients
from gpipe_cli.pipeline.flight import Flight
from gpipe_cli.pipeline.leaves import Collected
from gpipe_cli.pipeline.microbatch import Value, gather
from gpipe_cli.pipeline.pytree import unflatten
from gpipe_cli.pipeline.tied import Aliases
from gpipe_cli.torch_internals.graph_task import fills_leaf, has_hooks, is_asked_for, is_captured, keeps_graph

__all__ = ["bridge", "joined_input_gradients"]

RunBackward = Callable[..., None]
"""Runs the backward of a flight: see `Executor.backward`."""


def bridge(flight: Flight, run_backward: RunBackward) -> Value:
    """The flight's joined output, attached to the input and the parameters as one node of the caller's graph."""
    parts = flight.output_parts()
    tensors, template = gather(parts)
    columns = zip(*(flight.outputs[piece.index].needs_grad for piece in flight.micro_batches), strict=True)
    needs_grad = [any(column) for column in columns]
    if not any(needs_grad):
        return unflatten(template, tensors)
    rows = [[tensor.size(0) if tensor.dim() else 0 for tensor in of_part] for of_part, _ in parts]
    # The flight lives as long as the output's graph; nothing else may keep the outputs of its micro-batches.
    flight.outputs.clear()
    crossing = _Crossing(flight, run_backward, needs_grad, rows, flight.parameters)
    attached = _Bridge.apply(  # type: ignore[no-untyped-call]
        crossing, tensors, ANCHOR, *flight.batch.tensors, *crossing.parameters
    )
    return unflatten(template, attached)


@final
@dataclass(frozen=True, slots=True)
class _Crossing:
    """What the backward needs to know of the forward."""

    flight: Flight
    run_backward: RunBackward
    needs_grad: list[bool]
    rows: list[list[int]]
    """By micro-batch and output tensor."""
    parameters: list[nn.Parameter]

    def run(self, gradients: tuple[Tensor | None, ...], *, keep_graph: bool) -> list[Tensor | None]:
        """Run the backward; the gradients of the parameters that autograd is to hand on, None for the others.

        The workers add gradients to parameters themselves. Autograd hands on those that `autograd.grad` asks for, and
        those of parameters with hooks: it would call their hooks anyway, and else without a gradient.
        """
        flight = self.flight
        flight.check_input()
        tied = {parameter for parameter, _ in flight.tied.users}
        everything = fills_leaf(ANCHOR)
        asked = self.parameters if everything else [one for one in self.parameters if is_asked_for(one)]
        handed_on = [
            one for one in asked if has_hooks(one) or (not everything and (one in tied or is_captured(one)))
        ]
        (aliases,) = flight.aliases_by_layer
        leaves = {id(one): _leaves(one, aliases, one in tied) for one in handed_on}
        if handed_on or not everything:
            flight.collected = Collected(
                {id(leaf): leaf for of_parameter in leaves.values() for leaf in of_parameter},
                None if everything else {id(one) for one in asked},
            )
        self.run_backward(flight, _cut(gradients, self.rows), keep_graph=keep_graph)
        collected, flight.collected = flight.collected, None
        if everything:
            flight.tied.add_up(aliases, but=handed_on)
        if collected is None:
            return [None] * len(self.parameters)
        return [_sum([collected.take(leaf) for leaf in leaves.get(id(one), ())]) for one in self.parameters]


def _leaves(parameter: nn.Parameter, aliases: Sequence[Aliases], is_tied: bool) -> list[Tensor]:
    """What stands for a parameter in the graphs of the partitions, in the order of the layers."""
    if not is_tied:
        return [parameter]
    return [alias for of_layer in aliases if (alias := of_layer.of(parameter)) is not None]


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return functools.reduce(torch.add, present) if present else None


@final
class _Bridge(Function):
    @staticmethod
    def forward(
        ctx: Any, crossing: _Crossing, outputs: tuple[Tensor, ...], anchor: Tensor, *leaves: Tensor
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
        of_parameters = crossing.run(gradients, keep_graph=keeps_graph())
        return (None, None, None, *joined_input_gradients(crossing.flight), *of_parameters)


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
    return tuple(
        _sum(gradients) if place in flight.batch.whole else _join(gradients, tensors)
        for place, (gradients, tensors) in enumerate(
            zip(zip(*pieces, strict=True), zip(*flight.batch.inputs, strict=True), strict=True)
        )
    )


def _join(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> Tensor | None:
    if all(gradient is None for gradient in gradients):
        return None
    filled = [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(gradients, tensors, strict=True)
    ]
    return filled[0] if len(filled) == 1 else torch.cat(filled)
