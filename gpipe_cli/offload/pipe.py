"""A sequence on one device, slice by slice: each is brought in, run for all micro-batches, and put away again.

The pipe of engine=offload, and what OffloadModel shares with it. It is run by the pipeline's own walk, in the
order of `by_slice`, so keys, recomputation, skips and errors are the same as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from gpipe_cli.pipeline.cutting import cut, make_partitions, place_buffers
from gpipe_cli.pipeline.executor import Executor
from gpipe_cli.pipeline.residence import Residence
from gpipe_cli.pipeline.runner import Runner
from gpipe_cli.pipeline.worked import WorkedSequence
from gpipe_cli.schedule.by_slice import order

__all__ = ["SlicedPipe", "SlicedSequence"]


class SlicedSequence(WorkedSequence):
    """Base of those that one worker runs by slices."""

    def _run_by_slices(self, balance: Sequence[int], device: torch.device, residence: Residence) -> None:
        self.devices = [device]
        views = cut(self.module, self._layers, balance)
        self._keep_views(views)
        place_buffers(self.module, device)
        partitions = make_partitions(views, self._layers, balance, self.devices)
        self._runner = Runner(
            partitions,
            Executor(partitions, order, workers=1, residences=[residence]),
            self._batch_norms,
        )


@final
class SlicedPipe(SlicedSequence):
    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        *,
        device: torch.device,
        residence: Residence,
        chunks: int = 1,
        checkpoint: str = "always",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__(module, chunks, deferred_batch_norm)
        self.checkpoint = checkpoint
        self._run_by_slices(balance, device, residence)
