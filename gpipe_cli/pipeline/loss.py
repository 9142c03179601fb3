"""The loss of a step, one micro-batch at a time.

The mean loss of a micro-batch is weighted by its size, so loss and gradients are those of the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.pipeline.context import MicroBatch, is_recomputing
from gpipe_cli.pipeline.microbatch import Batch, Value
from gpipe_cli.pytree import map_tensors, unflatten

LossFunction = Callable[[Any, Any], Tensor]


@final
class StepLoss:
    """Computes and keeps the losses of one step, in the order of the micro-batches. One thread uses it."""

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
        self.restart()

    def restart(self) -> None:
        """Forget the losses and outputs of a step that has to run again."""
        self._losses: list[Tensor] = []
        self.outputs: list[Value] = []
        """Those of all micro-batches, if `keeps_outputs`."""

    def weighted(self, output: Value, micro_batch: MicroBatch) -> Tensor:
        """The micro-batch's share of the loss of the mini-batch, with its graph."""
        loss = self._function(output, self._targets[micro_batch.index])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"loss_fn must give one number per call, got {_shape(loss)}")
        weighted = (loss if loss.dim() == 0 else loss.reshape(())) * (micro_batch.size / self._rows)
        if not is_recomputing():
            self._losses.append(weighted.detach())
            if self._keeps_outputs:
                self.outputs.append(map_tensors(Tensor.detach, output))
        return weighted

    def set_total_rows(self, rows: int) -> None:
        """Weight by `rows` instead: the mini-batch is one replica's part of a larger one."""
        self._rows = rows

    def total(self) -> Tensor:
        """The sum of the losses so far, detached: that of the mini-batch once all its micro-batches have run."""
        return torch.stack(self._losses).sum() if self._losses else torch.zeros(())


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
