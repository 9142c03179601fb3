"""The loss of a step, micro-batch by micro-batch.

Decides that each micro-batch's mean loss counts by its size, so that loss and gradients are those of the
whole batch. Knows nothing of where it runs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.pipeline.context import MicroBatch, is_recomputing
from gpipe_cli.pipeline.keys import layer_seed
from gpipe_cli.pipeline.microbatch import Value, batch_size, check, detached, scatter
from gpipe_cli.torch_internals.keyed_random import KeyedRandom

__all__ = ["LossFunction", "LossHabits", "StepLoss"]

LossFunction = Callable[[Any, Any], Tensor]


@final
class LossHabits:
    """Remembers the loss function that was last seen to draw nothing: it need not run under a key again."""

    def __init__(self) -> None:
        self._quiet: weakref.ref[LossFunction] | None = None
        self._trusting = True

    def __reduce__(self) -> tuple[type[LossHabits], tuple[()]]:
        return LossHabits, ()

    def may_draw(self, function: LossFunction) -> bool:
        return self._quiet is None or self._quiet() is not function

    def learn(self, function: LossFunction, draws: bool) -> None:
        self._quiet = None
        if not draws and self._trusting:
            with contextlib.suppress(
                TypeError
            ):  # not everything that can be called can be referred to weakly
                self._quiet = weakref.ref(function)

    def distrust(self) -> None:
        """Something drew that had not drawn at first."""
        self._quiet, self._trusting = None, False


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
        may_draw: bool = True,
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
        self.draws = may_draw
        """Whether it runs under a key; learnt from the first micro-batch."""
        self._keeps_outputs = keeps_outputs
        self._outputs: list[Value] = []
        self._weighted: list[Tensor] = []

    def weighted(self, output: Value, micro_batch: MicroBatch, key: int, random: KeyedRandom) -> Tensor:
        """This micro-batch's part of the loss of the whole batch, ready for backward."""
        target = self._targets[micro_batch.index]
        if self.draws:
            with random.reseed(layer_seed(key, self._position, micro_batch.index)):
                loss = self._function(output, target)
            self.draws = random.drew
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

    def head(self, key: int) -> Callable[[Value, MicroBatch, KeyedRandom], Tensor]:
        """`weighted` under one step's key, to follow the last layer."""
        return lambda output, micro_batch, random: self.weighted(output, micro_batch, key, random)

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
