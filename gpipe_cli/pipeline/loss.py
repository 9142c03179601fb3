"""The loss of a step, micro-batch by micro-batch.

Decides that each micro-batch's mean loss counts by its size, so that loss and gradients are those of the
whole batch. Knows nothing of where it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.pipeline.context import MicroBatch, is_recomputing
from gpipe_cli.pipeline.microbatch import Batch, Value
from gpipe_cli.pipeline.pytree import map_tensors, unflatten

__all__ = ["LossFunction", "StepLoss"]

LossFunction = Callable[[Any, Any], Tensor]


@final
class StepLoss:
    """Computes and remembers the losses of one step, micro-batch after micro-batch; one thread uses it."""

    def __init__(
        self,
        function: LossFunction,
        target: Value,
        rows: int,
        count: int,
        *,
        keeps_outputs: bool,
    ) -> None:
        if not torch.is_grad_enabled():
            raise RuntimeError("step computes gradients and cannot run under no_grad: call the pipe instead")
        batch = Batch(target, "target")
        if batch.rows != rows:
            raise ValueError(
                f"target and input must agree on the batch size (target: {batch.rows}, input: {rows})"
            )
        self._function = function
        self._targets = [unflatten(batch.template, tensors) for tensors in batch.scatter(count)]
        self._rows = max(rows, 1)
        self._keeps_outputs = keeps_outputs
        self._outputs: list[Value] = []
        self._weighted: list[Tensor] = []

    def weighted(self, output: Value, micro_batch: MicroBatch) -> Tensor:
        """This micro-batch's part of the loss of the whole batch, ready for backward."""
        loss = self._function(output, self._targets[micro_batch.index])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"loss_fn must give one number per call, got {_shape(loss)}")
        weighted = (loss if loss.dim() == 0 else loss.reshape(())) * (micro_batch.size / self._rows)
        if not is_recomputing():
            self._weighted.append(weighted.detach())
            if self._keeps_outputs:
                self._outputs.append(map_tensors(Tensor.detach, output))
        return weighted

    def count_in(self, rows: int) -> None:
        """The batch is a part of one with so many rows: what it gives is its part of the mean over those."""
        self._rows = rows

    def total(self) -> Tensor:
        """The loss of all micro-batches seen, detached: that of the whole batch where it has seen them all."""
        return torch.stack(self._weighted).sum() if self._weighted else torch.zeros(())

    def outputs(self) -> list[Value]:
        """Those of all micro-batches, if they were to be kept."""
        return self._outputs


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
