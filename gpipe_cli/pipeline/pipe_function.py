"""The autograd function that stands for the whole pipe in the caller's graph, so that `loss.backward()` works.

It splits the gradients of the output into micro-batches, runs the backward of the partitions, and joins the gradients
of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gpipe_cli.pipeline.batch_state import BatchState
from gpipe_cli.pipeline.boundary import ANCHOR, Gradients
from gpipe_cli.pipeline.microbatch import Value, gather
from gpipe_cli.pytree import unflatten
from gpipe_cli.torch_internals.autograd import fills_leaf, has_hooks, keeps_graph

RunBackward = Callable[..., None]
"""`Executor.backward`."""


def attach_to_graph(state: BatchState, run_backward: RunBackward) -> Value:
    """The joined output of a forward, as the output of one autograd node over the input and the parameters."""
    parts = state.output_parts()
    tensors, template = gather(parts)
    columns = zip(
        *(state.outputs[piece.index].needs_grad for piece in state.batch.micro_batches), strict=True
    )
    needs_grad = [any(column) for column in columns]
    if not any(needs_grad):
        return unflatten(template, tensors)
    rows = [[tensor.size(0) if tensor.dim() else 0 for tensor in part] for part, _ in parts]
    # The state lives as long as the graph of the output; it must not keep the outputs of the micro-batches alive.
    state.outputs.clear()
    backward = _PipeBackward(state, run_backward, needs_grad, rows, state.tied.trained)
    attached = _PipeFunction.apply(  # type: ignore[no-untyped-call]
        backward, tensors, ANCHOR, *state.batch.tensors, *backward.parameters
    )
    return unflatten(template, attached)


@final
@dataclass(frozen=True, slots=True)
class _PipeBackward:
    state: BatchState
    run_backward: RunBackward
    needs_grad: list[bool]
    rows: list[list[int]]
    """By micro-batch and output tensor."""
    parameters: list[nn.Parameter]

    def run(self, gradients: tuple[Tensor | None, ...], *, keep_graph: bool) -> list[Tensor | None]:
        """Run the backward; return the gradients of the parameters that autograd accumulates, None for the others.

        The workers add to `.grad` of most parameters themselves. Autograd does it for parameters with hooks: it would
        call their hooks anyway, without a gradient.
        """
        state = self.state
        # The anchor is reached by a plain backward(), but not by inputs= or autograd.grad, which name their leaves.
        if not fills_leaf(ANCHOR):
            raise RuntimeError(
                "torch.autograd.grad and backward(inputs=...) do not work through a pipe, whose workers fill .grad of "
                "all parameters. Call backward() without inputs=, and read .grad"
            )
        hooked = {parameter for parameter in self.parameters if has_hooks(parameter)}
        if hooked - state.tied.separated:
            raise RuntimeError(
                "a hook was registered on a parameter of a pipe between forward and backward. Register it before the "
                "forward"
            )
        self.run_backward(state, _split(gradients, self.rows), keep_graph=keep_graph)
        (untied,) = state.untied_by_layer()
        state.tied.add_up(untied, exclude=hooked)
        return [
            state.tied.take_sum(untied, parameter) if parameter in hooked else None
            for parameter in self.parameters
        ]


@final
class _PipeFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, pipe_backward: _PipeBackward, outputs: tuple[Tensor, ...], anchor: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pipe_backward = pipe_backward
        ctx.set_materialize_grads(False)
        outputs = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(
            *(output for output, needed in zip(outputs, pipe_backward.needs_grad, strict=True) if not needed)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True does not work through a pipe: its partitions' graphs are detached from each other"
            )
        pipe_backward: _PipeBackward = ctx.pipe_backward
        with pipe_backward.state.streams.entered_in_backward():
            parameter_gradients = pipe_backward.run(gradients, keep_graph=keeps_graph())
            return (None, None, None, *pipe_backward.state.joined_input_gradients(), *parameter_gradients)


def _split(gradients: tuple[Tensor | None, ...], rows: list[list[int]]) -> list[Gradients]:
    """The gradients of each micro-batch's output."""
    if len(rows) == 1:
        return [gradients]
    columns = [
        [None] * len(rows) if gradient is None else torch.split(gradient, [row[place] for row in rows])
        for place, gradient in enumerate(gradients)
    ]
    return list(zip(*columns, strict=True))
