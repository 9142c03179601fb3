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
from gpipe_cli.pipeline.keys import layer_seed
from gpipe_cli.pipeline.microbatch import Value, batch_size, check, detached, scatter
from gpipe_cli.torch_internals.keyed_random import KeyedRandom

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
        layers: int,
        *,
        keeps_outputs: bool,
    ) -> None:
        if not torch.is_grad_enabled():
            raise RuntimeError("step computes gradients and cannot run under no_grad: call the pipe instead")
        target_rows = batch_size(check(target), "target")
        if target_rows != rows:
            raise ValueError(
                f"target and input must agree on the batch size (target: {target_rows}, input: {rows})"
            )
        self._function = function
        self._targets = scatter(target, count)
        self._rows = max(rows, 1)
        self._position = layers
        # loss_fn may be another function each step, so what it draws is learnt anew from each first micro-
        # batch.
        self._draws = True
        self._keeps_outputs = keeps_outputs
        self._outputs: list[Value] = []
        self._weighted: list[Tensor] = []

    def weighted(self, output: Value, micro_batch: MicroBatch, key: int, random: KeyedRandom) -> Tensor:
        """This micro-batch's part of the loss of the whole batch, ready for backward."""
        target = self._targets[micro_batch.index]
        if self._draws:
            with random.reseed(layer_seed(key, self._position, micro_batch.index)):
                loss = self._function(output, target)
            self._draws = random.drew
        else:
            loss = self._function(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"loss_fn must give one number per call, got {_shape(loss)}")
        weighted = (loss if loss.dim() == 0 else loss.reshape(())) * (micro_batch.size / self._rows)
        if not is_recomputing():
            self._weighted.append(weighted.detach())
            if self._keeps_outputs:
                self._outputs.append(detached(output))
        return weighted

    def total(self) -> Tensor:
        """The loss of the whole batch, detached."""
        return torch.stack(self._weighted).sum()

    def outputs(self) -> list[Value]:
        """Those of all micro-batches, if they were to be kept."""
        return self._outputs


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
