"""The plain pipe: the sequence in one thread, micro-batch by micro-batch.

It is what every other way of running is compared with, to the bit: same micro-batches, same keys, backward
in ascending order. Knows nothing of partitions, workers or schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.boundary import roots_of
from gpipe_cli.pipeline.context import Running
from gpipe_cli.pipeline.culprit import failed_in_backward
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import Value, check, gather
from gpipe_cli.pipeline.minibatch import MiniBatch, guarded
from gpipe_cli.pipeline.tied import NO_ALIASES, Aliases, TiedParameters
from gpipe_cli.pipeline.wrapped import WrappedSequence
from gpipe_cli.skip.tracker import DictionarySkipTracker, use_skip_tracker
from gpipe_cli.torch_internals.graph_progress import next_number
from gpipe_cli.torch_internals.keyed_random import KeyedRandom

__all__ = ["PlainPipe"]


@final
class PlainPipe(WrappedSequence):
    """An nn.Sequential run micro-batch by micro-batch in the calling thread."""

    def __init__(self, module: nn.Sequential, *, chunks: int = 1, deferred_batch_norm: bool = False) -> None:
        super().__init__(module, chunks, deferred_batch_norm)
        self._tied = TiedParameters([layer.module for layer in self._layers])

    def _forward(self, input: Value) -> Value:
        batch = MiniBatch.of(input, self.chunks, key=None)
        with guarded(self._layers, self._devices(), self._batch_norms), batch.state.entered():
            random, aliases = KeyedRandom(), [NO_ALIASES] * len(self)
            outputs = [self._run(batch, index, random, [], aliases) for index in range(len(batch.inputs))]
        return gather(outputs)

    def _step(self, batch: MiniBatch, input: Value, make_loss: Callable[[], StepLoss]) -> StepLoss:
        loss = make_loss()
        random, aliases = KeyedRandom(), self._tied.aliases()
        with guarded(self._layers, self._devices(), self._batch_norms):
            for micro_batch in batch.micro_batches:
                marks: list[int] = []
                with batch.state.entered():
                    output = self._run(batch, micro_batch.index, random, marks, aliases)
                    weighted = loss.weighted(output, micro_batch, batch.key, random)
                marks.append(next_number())
                if weighted.requires_grad:
                    with batch.state.without_autocast():
                        self._backward(weighted, micro_batch.index, marks)
        self._tied.add_up(aliases)
        return loss

    def _backward(self, loss: Tensor, micro_batch: int, marks: list[int]) -> None:
        roots = roots_of([loss])
        try:
            torch.autograd.backward(loss)
        except BaseException as error:
            where = failed_in_backward(self._layers, roots, marks, error)
            error.add_note(f"in {where}, micro-batch {micro_batch} (backward)")
            raise

    def close(self) -> None:
        """Nothing to end: there are no workers."""

    def _devices(self) -> list[torch.device]:
        return [parameter.device for parameter in self.parameters()]

    def _run(
        self,
        batch: MiniBatch,
        index: int,
        random: KeyedRandom,
        marks: list[int],
        aliases: Sequence[Aliases],
    ) -> Value:
        value = batch.inputs[index]
        marks.append(next_number())
        with Running(batch.micro_batches[index]), use_skip_tracker(DictionarySkipTracker()):
            try:
                for layer, of_layer in zip(self._layers, aliases, strict=True):
                    with of_layer:
                        value = layer.run(value, batch.key, index, random)
                    marks.append(next_number())
            except BaseException as error:
                error.add_note(f"in layer {layer!r}, micro-batch {index} (forward)")
                raise
        return check(value)
