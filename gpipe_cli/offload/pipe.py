"""A sequence on one device, slice by slice: each is brought in, run for all micro-batches, and put away again.

The pipe of engine=offload and of OffloadModel. It is run by the pipeline's own walk, in the order of `by_slice`, so
keys, recomputation, skips and errors are the same as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import nn

from gpipe_cli.pipeline.cutting import cut, make_partitions, place_buffers
from gpipe_cli.pipeline.executor import Executor
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pipeline.minibatch import MiniBatch
from gpipe_cli.pipeline.residence import Residence
from gpipe_cli.pipeline.runner import Runner
from gpipe_cli.pipeline.tied import TiedParameters
from gpipe_cli.pipeline.walk import Recorder
from gpipe_cli.pipeline.wrapped import WrappedSequence
from gpipe_cli.schedule.by_slice import order

__all__ = ["SlicedPipe"]


@final
class SlicedPipe(WrappedSequence):
    partitions: nn.ModuleList

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
        self.devices = [device]
        views = cut(self.module, self._layers, balance)
        # Not a registered child, as in GPipe.
        self.__dict__["partitions"] = views
        place_buffers(self.module, device)
        partitions = make_partitions(views, self._layers, balance, self.devices)
        self._executor = Executor(partitions, order, workers=1, residences=[residence])
        self._runner = Runner(
            partitions,
            self._executor,
            TiedParameters([layer.module for layer in self._layers]),
            self._batch_norms,
        )

    @property
    def step_timeout(self) -> float | None:
        return self._executor.timeout

    @step_timeout.setter
    def step_timeout(self, seconds: float | None) -> None:
        self._executor.timeout = seconds

    @property
    def recorder(self) -> Recorder | None:
        return self._executor.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._executor.recorder = recorder

    def _forward(self, input: Value) -> Value:
        batch = MiniBatch.of(input, self.chunks, key=None)
        return self._runner.forward(batch, input, batch.checkpoint_stop(self.checkpoint, self.training))

    def _step(self, batch: MiniBatch, input: Value, make_loss: Callable[[], StepLoss]) -> StepLoss:
        stop = batch.checkpoint_stop(self.checkpoint, self.training)
        return self._runner.step(batch, input, make_loss, stop)

    def close(self) -> None:
        self._executor.close()
