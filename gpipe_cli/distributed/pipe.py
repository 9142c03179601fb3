"""One process's part of a pipeline: its partitions, run by torch's schedules together with those of its peers.

Every process calls it with the same mini-batch of its replica. A step leaves in the parameters of this process the
gradients of the whole mini-batch, of all replicas. The output is where the last partition is.

Decides what a step consists of. How micro-batches become flushes, what crosses borders, what a stage does and what
replicas tell each other stands in the files beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import final

from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from gpipe_cli.distributed.borders import Border, Sketch
from gpipe_cli.distributed.flushes import Flush, TorchScheduleClass, flushes, torch_schedule_class
from gpipe_cli.distributed.place import Place
from gpipe_cli.distributed.replicas import Replicas
from gpipe_cli.distributed.schedules import TorchSchedule
from gpipe_cli.distributed.shard import keep_only
from gpipe_cli.distributed.tied_gradients import TiedGradients
from gpipe_cli.pipeline.batch_state import BatchState
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm, commit_or_discard, deferred_batch_norms
from gpipe_cli.pipeline.boundary import PartitionInput
from gpipe_cli.pipeline.forward_task import MicroBatchLoss
from gpipe_cli.pipeline.gpipe import PipeBase
from gpipe_cli.pipeline.layer import replica_key
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import MiniBatch, Value
from gpipe_cli.pipeline.module_state import Buffer, all_buffers, save_buffers
from gpipe_cli.pipeline.partitioning import make_partitions, partition_modules
from gpipe_cli.pipeline.tied import TiedParameters, Untied
from gpipe_cli.schedule import traits
from gpipe_cli.schedule.checkpoint import Checkpoint

__all__ = ["RankPipe"]

_MOST_SCHEDULES = 8
"""Each keeps receive buffers for all its micro-batches. Training and evaluation with short last batches need six."""


@final
class RankPipe(PipeBase):
    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        place: Place,
        *,
        chunks: int,
        checkpoint: Checkpoint,
        schedule: str,
        deferred_batch_norm: bool,
    ) -> None:
        super().__init__(module, chunks, deferred_batch_norm)
        self.place = place
        self._checkpoint = checkpoint
        self._traits, self._torch_schedule = traits(schedule), torch_schedule_class(schedule)
        self._sketch = Sketch(self.module, balance, place.device)
        # Not registered children: the layers already are children of `module`, under their own names.
        self.__dict__["partitions"] = partition_modules(self.module, self._layers, balance)
        partitions = make_partitions(
            self.partitions, self._layers, balance, [place.device], keep_aliases=False
        )
        self._lengths = list(balance)
        self._own = [partitions[index] for index in place.own]
        self._own_layers = [layer for partition in self._own for layer in partition.layers]
        keep_only(self.module, [layer.module for layer in self._own_layers], place.device)
        self._own_batch_norms = [
            one for layer in self._own_layers for one in deferred_batch_norms(layer.module)
        ]
        self._tied = TiedParameters([layer.module for layer in self._layers])
        self._tied_gradients = TiedGradients(self._tied, self.rank_of_layer, place)
        self._replicas = Replicas(place)
        borrowed = {id(parameter) for parameter in self._tied_gradients.borrowed}
        self._summed = [
            one
            for one in self.module.parameters()
            if one.requires_grad and not one.is_meta and id(one) not in borrowed
        ]
        self._schedules: dict[tuple[object, ...], TorchSchedule] = {}

    partitions: nn.ModuleList
    """Of the whole model; only those of this process have storage."""

    def _forward(self, input: Value) -> Value:
        batch = self._mini_batch(MiniBatch.of(input, self.chunks, key=None))
        if not batch.rows:
            return ()
        # Without backward any schedule does what ScheduleGPipe does, unless a process has several partitions.
        schedule = self._torch_schedule if self._traits.several_per_device else ScheduleGPipe
        with commit_or_discard(self._own_batch_norms):
            state = self._run(batch, schedule, None)
        if not self.place.has_output:
            return ()
        return state.joined_output()

    def _step(self, batch: MiniBatch, loss: StepLoss) -> None:
        total = self._replicas.total(batch.rows)
        loss.set_total_rows(total)
        batch = self._mini_batch(batch)
        before = save_buffers(self._plain_buffers()) if self._replicas.several else ()
        untied = self._tied.untied()
        with commit_or_discard(self._own_batch_norms):
            if batch.rows:
                self._run(batch, self._torch_schedule, loss.weighted, untied)
            self._replicas.merge_moments(self._own_batch_norms)
        self._settle(untied)
        self._replicas.merge_buffers(before, batch.rows / total)

    def _settle(self, untied: Sequence[Untied]) -> None:
        """Tied parameters first, so that a replica gives the sum one alone would have; copies last."""
        self._tied_gradients.collect(untied)
        self._replicas.sum_gradients(self._summed)
        self._tied_gradients.spread()

    def _plain_buffers(self) -> list[Buffer]:
        """All but those of deferred batch norm, which replicas merge in a way of its own."""
        buffers = all_buffers([layer.module for layer in self._own_layers])
        return [one for one in buffers if not isinstance(one.module, DeferredBatchNorm)]

    def _run(
        self,
        batch: MiniBatch,
        schedule: TorchScheduleClass,
        loss: MicroBatchLoss | None,
        untied: Sequence[Untied] = (),
    ) -> BatchState:
        layers = iter(untied or self._tied.untied())
        recomputes = self.training and loss is not None
        state = BatchState(
            batch,
            [PartitionInput.of_pipe(tensors, batch.template) for tensors in batch.inputs],
            self._tied,
            [[tuple(islice(layers, length)) for length in self._lengths]],
            batch.checkpoint_stops(self._checkpoint, len(self._lengths), recomputes),
            loss,
        )
        for partition in self._own:
            partition.begin()
        sizes = [piece.size for piece in batch.micro_batches]
        legs = [
            (
                flush,
                self._sketch.borders(
                    batch.inputs[flush.first], batch.template, batch.state, training=self.training
                ),
            )
            for flush in flushes(sizes, schedule, self.place.ranks)
        ]
        for flush, borders in legs:
            self._schedule_for(flush, borders, training=loss is not None).run(state, flush.first)
        return state

    def _schedule_for(self, flush: Flush, borders: tuple[Border, ...], *, training: bool) -> TorchSchedule:
        """One made before, if it is among those used last.

        All processes of a replica see the same micro-batches, so all make and forget the same ones.
        """
        key = (flush.schedule, flush.count, borders, training)
        found = self._schedules.pop(key, None)
        if found is None:
            found = TorchSchedule(
                flush,
                self._own,
                borders,
                self.place,
                training=training,
                splits_backward=self._traits.splits_backward,
            )
        self._schedules[key] = found
        while len(self._schedules) > _MOST_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        return found

    def _mini_batch(self, batch: MiniBatch) -> MiniBatch:
        return replace(batch, key=replica_key(batch.key, self.place.replica))

    @property
    def rank_of_layer(self) -> list[int]:
        """The process of each layer."""
        return [
            self.place.rank_of(partition)
            for partition, length in enumerate(self._lengths)
            for _ in range(length)
        ]

    def close(self) -> None:
        """Nothing to end: groups are their maker's."""
        self._schedules.clear()
