"""Our schedules by the classes torch has for them, and the stages they run.

A schedule's traits name its class. All of them sum gradients in the order of the micro-batches; torch's LoopedBFS does
not, so no schedule names it. A stage object keeps the receive buffers of one shape and one mode: torch would infer
shapes again whenever training and evaluation alternate, so each has its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from gpipe_cli.distributed.borders import Border
from gpipe_cli.distributed.flushes import Flush
from gpipe_cli.distributed.place import Place
from gpipe_cli.distributed.stage import Stage
from gpipe_cli.pipeline.batch_state import BatchState
from gpipe_cli.pipeline.partition import Partition

__all__ = ["TorchSchedule"]

_NUMBER = torch.empty((), device="meta", requires_grad=True)
"""What the last stage gives torch: the loss. It goes nowhere, so in evaluation its shape does not matter."""
_torch_log = logging.getLogger("torch.distributed.pipelining.schedules")


@final
class TorchSchedule:
    """What torch needs to run flushes of one kind: a schedule, a number of micro-batches, their borders."""

    def __init__(
        self,
        flush: Flush,
        partitions: Sequence[Partition],
        borders: Sequence[Border],
        place: Place,
        *,
        training: bool,
        splits_backward: bool,
    ) -> None:
        self._count = flush.count
        self._training = training
        self._has_output = place.has_output
        following = [*borders[1:], None]
        # Only torch's schedules of several stages ask a stage for the second half of its backward.
        several_stages = issubclass(flush.schedule, PipelineScheduleMulti)
        split = splits_backward and several_stages
        self._stages = [
            Stage(one, borders[one.index], following[one.index], split=split) for one in partitions
        ]
        torch_stages = [
            _torch_stage(stage, one.index, borders[one.index], following[one.index], place)
            for stage, one in zip(self._stages, partitions, strict=True)
        ]
        stages: Any = torch_stages if several_stages else torch_stages[0]
        self._schedule: Any = flush.schedule(
            stages, flush.count, loss_fn=_given if training else None, scale_grads=False
        )

    def run(self, state: BatchState, first: int) -> None:
        """Take so many micro-batches of the mini-batch from `first` on through the pipeline."""
        for stage in self._stages:
            stage.begin(state, first)
        # torch wants a target to split, where there is a loss; the loss has seen the real one already.
        needs_target = self._training and self._has_output
        target = {"target": torch.zeros(self._count)} if needs_target else {}
        try:
            with _silenced():
                self._schedule.step(**target, return_outputs=False)
        except Exception as error:
            failure, state.failure = state.failure, None
            if failure is None or failure is error:
                raise
            raise failure from None
        finally:
            for stage in self._stages:
                stage.end()


def _torch_stage(
    stage: Stage, index: int, entering: Border, leaving: Border | None, place: Place
) -> PipelineStage:
    return PipelineStage(
        stage,
        index,
        place.partitions,
        place.device,
        input_args=tuple(kind.example() for kind in entering.kinds) if index else (),
        output_args=_NUMBER if leaving is None else tuple(kind.example() for kind in leaving.kinds),
        group=place.pipe,
        dw_builder=stage.weights_half if stage.split else None,
    )


def _given(output: Tensor, target: Tensor) -> Tensor:
    """The loss is what the last stage gives."""
    return output


@contextmanager
def _silenced() -> Iterator[None]:
    """torch prints a whole schedule when a stage raises; whoever catches the error has more to say."""
    before, _torch_log.disabled = _torch_log.disabled, True
    try:
        yield
    finally:
        _torch_log.disabled = before
