"""The face of the pipes whose partitions are run by workers: `GPipe`, and the one that goes slice by slice.

Decides what they have in common: a step by the runner, its time limit, its recorder and its end. Knows nothing of how
the sequence is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Self

import torch
from torch import nn

from gpipe_cli.pipeline.hooks import refuse_hooks
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pipeline.minibatch import MiniBatch
from gpipe_cli.pipeline.runner import Runner
from gpipe_cli.pipeline.walk import Recorder
from gpipe_cli.pipeline.wrapped import WrappedSequence
from gpipe_cli.schedule.checkpoint import Checkpoint

__all__ = ["WorkedSequence"]


class WorkedSequence(WrappedSequence):
    """Whoever inherits sets these before it is used."""

    checkpoint: Checkpoint
    devices: list[torch.device]
    partitions: nn.ModuleList
    _runner: Runner

    def _keep_views(self, views: nn.ModuleList) -> None:
        for index, view in enumerate(views):
            refuse_hooks(view, f"pipe.partitions[{index}]")
        # Not a registered child: the layers already are children of `module`, under their own names.
        self.__dict__["partitions"] = views

    def _holders(self) -> list[Iterable[nn.Module]]:
        return [self.module, chain(*self.partitions)]

    def _forward(self, input: Value) -> Value:
        batch = MiniBatch.of(input, self.chunks, key=None)
        return self._runner.forward(batch, self._stops(batch))

    def _step(self, batch: MiniBatch, make_loss: Callable[[], StepLoss]) -> StepLoss:
        return self._runner.step(batch, make_loss, self._stops(batch))

    def _stops(self, batch: MiniBatch) -> tuple[int, ...]:
        return batch.checkpoint_stops(self.checkpoint, self._runner.partitions, self.training)

    @property
    def step_timeout(self) -> float | None:
        """Seconds after which a call whose workers have not ended raises StepTimeout; None waits for ever."""
        return self._runner.executor.timeout

    @step_timeout.setter
    def step_timeout(self, seconds: float | None) -> None:
        self._runner.executor.timeout = seconds

    @property
    def recorder(self) -> Recorder | None:
        """Told of every action when it has ended; None costs nothing."""
        return self._runner.executor.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._runner.executor.recorder = recorder

    def close(self) -> None:
        """End the workers. Closing twice is fine, and using the pipe again starts new ones."""
        self._runner.executor.close()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.partitions.train(mode)
        return self
