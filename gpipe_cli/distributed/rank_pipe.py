"""The part of a pipeline that one process runs: its partitions, driven by torch's schedules together with its peers.

Every process calls it with the mini-batch of its replica. After a step the parameters of this process have the
gradients of the mini-batches of all replicas. The process with the last partition returns the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

from gpipe_cli.accelerator.device_errors import note_device
from gpipe_cli.distributed.boundary_shapes import BoundarySpec, ShapeInference
from gpipe_cli.distributed.gradient_buckets import GradientBuckets
from gpipe_cli.distributed.groups import RankCoords
from gpipe_cli.distributed.replicas import Replicas, TiedGradients
from gpipe_cli.distributed.torch_schedule import (
    Flush,
    TorchSchedule,
    TorchScheduleClass,
    flushes,
    torch_schedule_class,
)
from gpipe_cli.pipeline.batch_state import BatchState
from gpipe_cli.pipeline.batchnorm import commit_or_discard, deferred_batch_norms
from gpipe_cli.pipeline.boundary import PartitionInput
from gpipe_cli.pipeline.layer import replica_key
from gpipe_cli.pipeline.layer_logging import log_layer_times
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import MiniBatch, Value
from gpipe_cli.pipeline.module_state import BufferState, SharedState, buffer_owners, modules_of, tensors_in
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.pipeline.tied import TiedParameters, Untied
from gpipe_cli.schedule import ScheduleModule
from gpipe_cli.schedule.action import Checkpoint
from gpipe_cli.sequential.deferred import load_parameters, meta_like

_MAX_CACHED_SCHEDULES = 8
"""Each holds receive buffers for all its micro-batches. Training and evaluation with short last batches need six."""


def rank_pipe(
    module: nn.Sequential,
    balance: Sequence[int],
    coords: RankCoords,
    *,
    chunks: int,
    checkpoint: Checkpoint,
    schedule: str | ScheduleModule,
    deferred_batch_norm: bool,
) -> Pipe:
    """Only the partitions of this process have storage."""
    pipe = Pipe(module, chunks, deferred_batch_norm)
    pipe._divide(balance)
    runner = RankRunner(pipe, balance, coords, schedule)
    return pipe._run_by(runner, [coords.device], checkpoint)


def rank_of_layer(balance: Sequence[int], coords: RankCoords) -> list[int]:
    """The rank of each layer, in the pipe."""
    return [coords.rank_of(partition) for partition, length in enumerate(balance) for _ in range(length)]


@final
class RankRunner:
    """Runs the partitions of this process under torch's schedules; its peers run the others."""

    def __init__(
        self,
        pipe: Pipe,
        balance: Sequence[int],
        coords: RankCoords,
        schedule: str | ScheduleModule,
    ) -> None:
        self._module, self._balance, self._coords = pipe.module, list(balance), coords
        self._schedule, self._torch_schedule = schedule, torch_schedule_class(schedule)
        self._shape_inference = ShapeInference(pipe.module, balance, coords.device)
        partitions = pipe._partitions_on([coords.device])
        self._own = [partitions[index] for index in coords.own_partitions]
        own_layers = [layer for partition in self._own for layer in partition.layers]
        self._own_modules = [layer.module for layer in own_layers]
        own = ", ".join(str(partition.index) for partition in self._own)
        with note_device(f"moving partition{'s' if len(self._own) > 1 else ''} {own}", coords.device):
            keep_only(pipe.module, self._own_modules, coords.device)
        self._own_batch_norms = [
            batch_norm for layer in own_layers for batch_norm in deferred_batch_norms(layer.module)
        ]
        self._shared = SharedState.between([list(partition.children()) for partition in pipe.partitions])
        self._tied = TiedParameters(list(pipe.module))
        self._tied_gradients = TiedGradients(self._tied, rank_of_layer(balance, coords), coords)
        self._replicas = Replicas(coords)
        self._gradient_buckets = self._make_gradient_buckets() if self._replicas.several else None
        self._schedules: dict[tuple[object, ...], TorchSchedule] = {}

    @property
    def partition_devices(self) -> dict[int, torch.device]:
        return {partition.index: partition.device for partition in self._own}

    def forward(self, batch: MiniBatch, checkpointed_counts: Sequence[int]) -> Value:
        state = self._run_forward(batch, None)
        return state.joined_output() if state is not None and self._coords.has_output else ()

    def loss(self, batch: MiniBatch, loss: StepLoss) -> None:
        self._run_forward(batch, loss)

    def _run_forward(self, batch: MiniBatch, loss: StepLoss | None) -> BatchState | None:
        """None if the replica has no part of the mini-batch."""
        batch = self._of_replica(batch)
        if not batch.rows:
            return None
        # Without backward any schedule does what ScheduleGPipe does, unless partitions are placed in another way.
        placed = self._coords.workers != tuple(range(self._coords.ranks))
        schedule = self._torch_schedule if placed else ScheduleGPipe
        with commit_or_discard(self._own_batch_norms):
            # No backward follows, so nothing is recomputed.
            return self._run(batch, schedule, loss, [0] * len(self._balance), training=False)

    def step(self, batch: MiniBatch, loss: StepLoss, checkpointed_counts: Sequence[int]) -> None:
        rows, loss.total_weight = self._replicas.totals(batch.rows, loss.total_weight)
        batch = self._of_replica(batch)
        before = BufferState(buffer_owners(modules_of(self._own_modules))) if self._replicas.several else None
        untied = self._tied.untied()
        if self._gradient_buckets is not None:
            self._gradient_buckets.begin()
        with commit_or_discard(self._own_batch_norms):
            if batch.rows:
                self._run(batch, self._torch_schedule, loss, checkpointed_counts, untied)
            # Collectives, from here on: a replica without samples takes part in them. Buckets come first, because other
            # replicas may have started some of them already, and all replicas must keep to one order.
            self._sum_gradients(untied)
            self._replicas.merge_moments(self._own_batch_norms)
        if before is not None:
            self._replicas.merge_buffers(before.changes(), batch.rows / rows)

    def _sum_gradients(self, untied: Sequence[Untied]) -> None:
        # Tied gradients are summed within a replica first, as a single process would, and sent to the copies last.
        self._tied_gradients.collect(untied)
        if self._gradient_buckets is not None:
            self._gradient_buckets.finish()
        self._tied_gradients.spread()

    def _make_gradient_buckets(self) -> GradientBuckets:
        borrowed = set(self._tied_gradients.borrowed)
        # A borrowed copy is left out: its owner sums the gradient over replicas, and `spread` sends the sum.
        parameters = [
            parameter
            for parameter in self._module.parameters()
            if parameter.requires_grad and not parameter.is_meta and parameter not in borrowed
        ]
        tied = [parameter for parameter, _ in self._tied.users]
        assert self._coords.data is not None, "only replicas sum gradients"
        return GradientBuckets(parameters, self._coords.data, late=tied)

    def _run(
        self,
        batch: MiniBatch,
        schedule: TorchScheduleClass,
        loss: StepLoss | None,
        checkpointed_counts: Sequence[int],
        untied: Sequence[Untied] = (),
        *,
        training: bool = True,
    ) -> BatchState:
        layers = iter(untied or self._tied.untied())
        state = BatchState(
            batch,
            [PartitionInput.of_pipe(tensors, batch.template) for tensors in batch.inputs],
            self._tied,
            [[tuple(islice(layers, length)) for length in self._balance]],
            checkpointed_counts,
            None if loss is None else loss.weighted,
        )
        for partition in self._own:
            partition.begin(self._shared, loss.modules if loss is not None and partition.is_last else ())
        sizes = [piece.size for piece in batch.micro_batches]
        # All shapes come before the first flush: every rank infers the whole model, so a layer that cannot be inferred
        # raises in all ranks, and none waits for a message.
        runs = [
            (
                flush,
                self._shape_inference.boundaries(
                    batch.inputs[flush.first], batch.template, batch.state, training=self._module.training
                ),
            )
            for flush in flushes(sizes, schedule, self._coords.ranks)
        ]
        for flush, boundaries in runs:
            self._schedule_for(flush, boundaries, training=training).run(state, flush.first)
        return state

    def _schedule_for(
        self, flush: Flush, boundaries: tuple[BoundarySpec, ...], *, training: bool
    ) -> TorchSchedule:
        """A cached schedule, or a new one.

        All processes of a replica see the same micro-batches, so their caches hold the same schedules.
        """
        key = (flush.schedule, flush.count, boundaries, training)
        cached = self._schedules.pop(key, None)
        if cached is None:
            cached = TorchSchedule(
                flush,
                self._own,
                boundaries,
                self._coords,
                training=training,
                our_schedule=self._schedule,
                gradient_buckets=self._gradient_buckets if training else None,
            )
        # Reinserted at the end: the first key of the dict is the least recently used schedule.
        self._schedules[key] = cached
        while len(self._schedules) > _MAX_CACHED_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        return cached

    def _of_replica(self, batch: MiniBatch) -> MiniBatch:
        return replace(batch, key=replica_key(batch.key, self._coords.replica))

    def log_layers(self) -> None:
        log_layer_times(self._own)

    def close(self) -> None:
        """Drop the cached schedules; the process groups belong to their creator."""
        self._schedules.clear()


def keep_only(module: nn.Sequential, own: Sequence[nn.Module], device: torch.device) -> None:
    """Move the layers in `own` to `device`, and replace every tensor that none of them uses by one without storage.

    Every process has all modules, so that all agree on names, shapes and ties, which remain.
    Deferred parameters are loaded for the layers in `own` only.
    """
    load_parameters(own, device)
    own_parts = {part for layer in own for part in layer.modules()}
    holders: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for part, name, tensor in tensors_in(module):
        holders.setdefault(tensor, []).append((part, name))
    for layer in own:
        layer.to(device)
    for tensor, places in holders.items():
        # torch moves a shared buffer once per place, and on some accelerators a shared parameter too.
        moved = [getattr(part, name) for part, name in places if part in own_parts]
        kept = moved[0] if moved else meta_like(tensor)
        for part, name in places:
            if getattr(part, name) is not kept:
                setattr(part, name, kept)
