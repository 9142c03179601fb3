"""The loss of a training step, and what is measured along with it, one micro-batch at a time.

The outputs of a step are never together in memory: the scores of a language model for a whole mini-batch would take
gigabytes, which no estimate of a partition's memory includes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.engines.protocol import TrainingObjective
from gpipe_cli.pipeline.context import current_microbatch, is_recomputing
from gpipe_cli.pipeline.loss import called_modules
from gpipe_cli.pytree import map_tensors

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
class TrainingLoss:
    """The loss function of a pipe's steps. Only the worker of the last partition calls it."""

    def __init__(
        self, objective: TrainingObjective, scaler: torch.amp.GradScaler, device: torch.device
    ) -> None:
        """device: where outputs and targets are."""
        self._objective, self._scaler, self._device_type = objective, scaler, device.type
        self._measures = False
        self._row_weights = torch.ones(0)
        self._sums: dict[int, Mapping[str, float]] = {}

    def begin(self, row_weights: Tensor, *, measure: bool) -> None:
        """Forget the previous step. row_weights: those of the next target, on the host."""
        self._measures, self._row_weights = measure, row_weights
        self._sums.clear()

    @property
    def sums(self) -> dict[str, float] | None:
        """What the step measured, which may be nothing; None in a process whose partitions have no loss."""
        if not self._sums:
            return None
        # In the order of the micro-batches, which decides the last bits of a sum.
        totals = Counter[str]()
        for _, sums in sorted(self._sums.items()):
            totals.update(sums)
        return dict(totals)

    def row_weights(self, target: Tensor) -> Tensor:
        # Counted before the target moved to its device: counting there, the host would wait for the previous step.
        return self._row_weights

    def modules(self) -> Iterable[nn.Module]:
        return called_modules(self._objective.loss)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        loss = self._scaler.scale(unscaled_loss(self._objective, output, target))
        micro_batch = current_microbatch()
        assert micro_batch is not None, "a pipe calls its loss for a micro-batch"
        if not is_recomputing():
            self._sums[micro_batch.index] = self._measured(output, target) if self._measures else {}
        return loss

    def _measured(self, output: Any, target: Tensor) -> Mapping[str, float]:
        with torch.no_grad():
            if not torch.is_autocast_enabled(self._device_type):
                return self._objective.measure(output, target)
            with torch.autocast(self._device_type, enabled=False):
                return self._objective.measure(output, target)


def unscaled_loss(objective: TrainingObjective, output: Any, target: Tensor) -> Tensor:
    # Under autocast scores are in half precision, in which a sum would lose most of its digits.
    return objective.loss(
        _float(output) if isinstance(output, Tensor) else map_tensors(_float, output), target
    )


def _float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in DTYPES.values() else tensor
