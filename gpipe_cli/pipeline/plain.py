"""The plain pipe: the sequence in one thread, micro-batch by micro-batch.

It is what every other way of running is compared with, to the bit: same micro-batches, same keys, backward
in ascending order. All layers are one partition, and the calling thread runs its actions.
"""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from gpipe_cli.pipeline.cutting import cut
from gpipe_cli.pipeline.executor import Executor
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.runner import Runner
from gpipe_cli.pipeline.worked import WorkedSequence
from gpipe_cli.schedule.action import Action, Kind, Order

__all__ = ["PlainPipe"]


@final
class PlainPipe(WorkedSequence):
    """An nn.Sequential run micro-batch by micro-batch in the calling thread."""

    def __init__(self, module: nn.Sequential, *, chunks: int = 1, deferred_batch_norm: bool = False) -> None:
        super().__init__(module, chunks, deferred_batch_norm)
        self.checkpoint = "never"
        self.devices = []
        self._keep_views(cut(self.module, self._layers, [len(self)]))
        partition = Partition(index=0, layers=self._layers, device=torch.device("cpu"))
        self._runner = Runner(
            [partition], Executor([partition], _order, workers=0), self._batch_norms, whole=True
        )


def _order(partitions: int, chunks: int, workers: int) -> Order:
    """Forward and backward of each micro-batch before the next one."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return (tuple(Action(kind, 0, micro_batch) for micro_batch in range(chunks) for kind in kinds),)
