"""Pipes whose partitions are stored elsewhere and brought to a device for as long as a worker needs them.

The executor of every pipe runs them, so keys, recompute, skips and errors are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import nn

from gpipe_cli.pipeline.action_loop import PartitionStore
from gpipe_cli.pipeline.executor import Executor, MakeOrder
from gpipe_cli.pipeline.gpipe import ThreadedPipe
from gpipe_cli.pipeline.partitioning import make_partitions, partition_modules, place_buffers
from gpipe_cli.schedule import order as schedule_order
from gpipe_cli.schedule.by_slice import order as slice_order
from gpipe_cli.schedule.checkpoint import Checkpoint


class OffloadedPipeBase(ThreadedPipe):
    def _set_up(
        self,
        balance: Sequence[int],
        devices: Sequence[torch.device],
        stores: Sequence[PartitionStore],
        make_order: MakeOrder = slice_order,
    ) -> None:
        """stores: one per device."""
        self.devices = list(devices)
        modules = partition_modules(self.module, self._layers, balance)
        self._set_partitions(modules)
        for index, module in enumerate(modules):
            place_buffers(module, self.devices[index % len(self.devices)])
        partitions = make_partitions(modules, self._layers, balance, self.devices)
        self._executor = Executor(partitions, make_order, len(devices), self._batch_norms, stores=stores)


@final
class OffloadedPipe(OffloadedPipeBase):
    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        *,
        devices: Sequence[torch.device],
        stores: Sequence[PartitionStore],
        schedule: str | None = None,
        chunks: int = 1,
        checkpoint: Checkpoint = "always",
        deferred_batch_norm: bool = False,
    ) -> None:
        """schedule: None runs each partition for all micro-batches before the next partition."""
        super().__init__(module, chunks, deferred_batch_norm)
        self.checkpoint = checkpoint
        make_order = slice_order if schedule is None else partial(schedule_order, schedule)
        self._set_up(balance, devices, stores, make_order)
