"""The memory of plans: what each partition of a plan needs, which plans fit the devices, and which sizes of
mini-batches and micro-batches a plan may therefore have.

For a model that no pipeline of the devices can hold, engine=offload is the plan: its slices, memory and time. Each
slice runs all micro-batches before the next one comes. In a step every slice comes to the device twice, for forward and
for backward, the second time with the optimizer's state, and its new weights and state go back. Copies and computation
overlap, so the slower of the two decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import final

import torch
from torch import nn

from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.size import memory_objective_of
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.build.optimizer import kept_state, optimizer_factory
from gpipe_cli.build.step import autocast_of, sample_must_fit, with_gradient
from gpipe_cli.config.schema import PlanConfig, TrainConfig
from gpipe_cli.config.words import sets_key
from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.sizing import DeviceDemand, device_demand, layer_bytes
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.plan.costs import LayerCosts, TransferCost
from gpipe_cli.plan.measured import MicroBatchSize
from gpipe_cli.plan.order_plans import order_problems
from gpipe_cli.plan.order_problem import OrderProblem
from gpipe_cli.plan.prediction import OFFLOAD, Limit, Prediction
from gpipe_cli.plan.search import CHECKPOINTS, FITTED, TURNS, PlanShape, powers_of_two
from gpipe_cli.plan.step_time import MemoryFit
from gpipe_cli.profiling.memory import (
    PartitionMemory,
    StateBytes,
    partition_memory,
    state_by_parameter,
    with_bytes,
)
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.action import checkpointed_counts
from gpipe_cli.schedule.spec import PipelineSpec

MAX_CHUNKS_PER_DEVICE = 8
"""Above this the bubble is only a few per cent, and small micro-batches are slow."""


@final
class PlanMemory:
    """Finds how much memory micro-batches need, for any number of rows."""

    def __init__(
        self,
        settings: PlanConfig | TrainConfig,
        model: nn.Sequential,
        sample_of: Callable[[int], Sample],
        limits: Sequence[int],
    ) -> None:
        """`limits` has one for each device; empty: memory is unlimited."""
        self._settings, self._model, self._sample_of = settings, model, sample_of
        self.limit = max(limits, default=None)
        """The limit of the device with the most memory."""
        self.limits = limits
        self.stats = cache(self._stats_of)
        self._objective = cache(lambda rows: self._objective_from(self.stats(rows)))
        self._known: tuple[int, MemoryObjective] | None = None

    @cached_property
    def state(self) -> StateBytes:
        """What the optimizer keeps for each parameter."""
        return state_by_parameter(optimizer_factory(self._settings, self._model), self._model)

    def add_stats(self, rows: int, stats: ModelStats) -> None:
        """Statistics that are known already, of a small micro-batch."""
        self._known = rows, self._objective_from(stats)

    def of(self, shape: PlanShape, balance: Sequence[int], rows: int) -> list[PartitionMemory]:
        """One for each partition."""
        return partition_memory(
            self._model, self.stats(rows), balance, shape.spec(), self.state, kept_state(self._settings)
        )

    def order_problems(
        self, plan: Prediction, costs: LayerCosts, rows: int, cores: int | None
    ) -> list[OrderProblem]:
        """The search for an order of a plan's balance."""
        spec = plan.shape.spec(cores)
        parts = with_bytes(
            costs.partitions(plan.balance, spec),
            self._model,
            self.stats(rows),
            plan.balance,
            self.state,
            kept_state(self._settings),
            costs.frozen_layers,
        )
        return order_problems(spec, parts, self.limits, equal_devices=costs.equal_devices)

    def fit(self, shape: PlanShape, rows: int) -> MemoryFit:
        modes = CHECKPOINTS if shape.checkpoint == FITTED else (str(shape.checkpoint),)
        return MemoryFit({mode: self._needed(replace(shape, checkpoint=mode), rows) for mode in modes})

    @property
    def resident_bytes(self) -> int:
        """What all layers together need, whatever the micro-batches: parameters, gradients, the optimizer's state."""
        memory = self._objective(2) if self._known is None else self._known[1]
        return memory.most(graphs=0, inputs=0)

    def may_fit(self, rows: int, devices: int) -> bool:
        """False only if no plan with so many rows in a micro-batch fits, engine=offload aside."""
        if self.limit is None:
            return True
        # Two rows, because batch norm rejects a single one; what micro-batches save grows with their rows.
        memory = self._objective(2)
        resident, with_graph = memory.most(graphs=0, inputs=0), memory.most(graphs=1, inputs=0)
        # Some device has its share of the parameters, and some partition its share of a micro-batch's activations.
        share = resident / devices
        if share > self.limit:  # whatever the rows, only engine=offload can hold the parameters
            share = 0.0
        return share + rows / 2 * (with_graph - resident) / max(TURNS) / devices <= self.limit

    def refusal(self, shape: PlanShape, rows: int) -> ConfigError:
        """What the shape would need at least."""
        return self._objective(rows).under(shape.spec()).refusal()

    def _needed(self, shape: PlanShape, rows: int) -> MemoryObjective | None:
        """The memory of the partitions, or None if the whole model fits, which is quicker to check."""
        if self.limit is None or self._surely_fits(shape, rows):
            return None
        memory = self._objective(rows).under(shape.spec())
        whole = (memory.allows(partition, 0, len(self._model)) for partition in range(shape.partitions))
        return None if all(whole) else memory

    def _surely_fits(self, shape: PlanShape, rows: int) -> bool:
        """Decide from a smaller micro-batch: twice the rows save at most twice as many bytes for backward."""
        if self._known is None:
            return False
        known_rows, memory = self._known
        times = -(-rows // known_rows)
        most = memory.most(graphs=times * (shape.chunks + 1), inputs=times * shape.chunks)
        return most <= min(self.limits) / shape.spec().partitions_per_device

    def _stats_of(self, rows: int) -> ModelStats:
        sample = self._sample_of(rows)
        with autocast_of(self._settings), sample_must_fit(sample):
            return model_stats(self._model, sample, count_flops=False)

    def _objective_from(self, stats: ModelStats) -> MemoryObjective:
        differ = self.limits if len(set(self.limits)) > 1 else ()
        return memory_objective_of(
            self._model, stats, PipelineSpec("gpipe", 1, 1), with_gradient(self.state), self.limit, differ
        )


@final
@dataclass(frozen=True)
class PlanSizes:
    settings: PlanConfig | TrainConfig
    overrides: Sequence[str]
    loader: BatchLoader
    memory: PlanMemory
    devices: int
    """The number of devices of one replica."""
    replicas: int
    estimated: bool

    @cached_property
    def chooses_batch_size(self) -> bool:
        """Only `gpipe plan` does, since another batch size trains differently, and only if memory is limited."""
        settings = self.settings
        if not settings.plans or settings.device_memory is None:
            return False
        return settings.batch_size == PlanConfig.batch_size and not sets_key(self.overrides, "batch_size")

    @cached_property
    def batch_sizes(self) -> list[int]:
        """Smallest first."""
        if not self.chooses_batch_size:
            return [self._batch_size]
        most = min(len(self.loader.data.train), self._most_rows * self._most_chunks * self.replicas)
        return [size for size in powers_of_two(most) if size >= self.replicas]

    def chunks(self, batch_size: int) -> list[int]:
        most = max(1, batch_size // (self.replicas * self.loader.least_rows))
        if self._gives_chunks:
            return [min(self.settings.chunks, most)]
        if self.estimated and not self.chooses_batch_size:
            return powers_of_two(most)
        return [chunks for chunks in powers_of_two(most) if chunks <= self._most_chunks]

    def rows(self, batch_size: int, chunks: int) -> int:
        """How many rows the largest micro-batch has."""
        replicas = self.replicas * self.loader.replicas
        return max(self.loader.least_rows, -(-batch_size // (chunks * replicas)))

    def to_measure(self) -> list[MicroBatchSize]:
        """In this order: first the plain run, which every plan is compared with, then ever larger micro-batches."""
        chunks_by_rows: dict[int, int] = {}
        for batch_size in self.batch_sizes:
            for chunks in self.chunks(batch_size):
                rows = self.rows(batch_size, chunks)
                if not self.chooses_batch_size or rows <= self._most_rows:
                    chunks_by_rows[rows] = max(chunks, chunks_by_rows.get(rows, 0))
        whole = self.rows(self._batch_size, 1)
        in_order = sorted(chunks_by_rows, key=lambda rows: (rows != whole, rows))
        return [MicroBatchSize(rows, chunks_by_rows[rows]) for rows in in_order]

    @property
    def _batch_size(self) -> int:
        """The one that was given, but here training cannot have more samples than there are."""
        given = self.settings.batch_size
        return given if self.estimated else min(given, len(self.loader.data.train))

    @cached_property
    def _most_rows(self) -> int:
        """The most rows, as a power of two, of a micro-batch that may fit."""
        rows = 1
        while 2 * rows <= len(self.loader.data.train) and self.memory.may_fit(2 * rows, self.devices):
            rows *= 2
        return rows

    @property
    def _most_chunks(self) -> int:
        return self.settings.chunks if self._gives_chunks else MAX_CHUNKS_PER_DEVICE * self.devices

    @property
    def _gives_chunks(self) -> bool:
        return sets_key(self.overrides, "chunks")


@final
@dataclass(frozen=True)
class MicroBatches:
    """A way to divide a mini-batch."""

    batch_size: int
    rows: int
    chunks: int


@final
@dataclass(frozen=True)
class OffloadPlanner:
    settings: PlanConfig | TrainConfig
    model: nn.Sequential
    device: torch.device
    memory: PlanMemory
    limit: int
    """Bytes of the device."""
    link: TransferCost
    """Between host and device."""
    sample_of: Callable[[int], Sample]
    costs_of: Callable[[int], LayerCosts]
    """The costs of a micro-batch with so many rows, on one device."""

    def best(self, divisions: Sequence[MicroBatches], checkpoints: Iterable[str]) -> Prediction | None:
        """The one with the most samples per second; None if none fits."""
        plans = self._fitting(divisions, checkpoints)
        return max(plans, key=lambda plan: plan.samples_per_second, default=None)

    def least_bytes(self, divisions: Sequence[MicroBatches]) -> int:
        """With which one of them fits, one layer on the device at a time."""
        single = [1] * len(self.model)
        return min(self._demand(division, "always").of(single) for division in divisions)

    def _fitting(self, divisions: Sequence[MicroBatches], checkpoints: Iterable[str]) -> Iterator[Prediction]:
        costs = list(map(float, layer_bytes(self.model)))
        for division, mode in product(divisions, checkpoints):
            demand = self._demand(division, mode)
            try:
                slices = demand.slices(costs, self.limit)
            except ConfigError:
                continue
            yield self._predicted(division, mode, demand, slices)

    def _demand(self, division: MicroBatches, mode: str) -> DeviceDemand:
        sample = self.sample_of(division.rows)
        batch_bytes = division.chunks * sum(each.nbytes for each in tensors_of((sample.input, sample.target)))
        return replace(
            self._resident,
            resident=self._resident.resident + batch_bytes,
            facts=self.memory.stats(division.rows),
            micro_batches=division.chunks,
            recomputed=checkpointed_counts(mode, 1, division.chunks)[0],
        )

    @cached_property
    def _resident(self) -> DeviceDemand:
        """What does not depend on the micro-batches."""
        return device_demand(
            self.model,
            optimizer_factory(self.settings, self.model),
            self.device,
            self.memory.stats(1),
            buffers=2,
            stores_gradients=self.settings.precision == "fp16",
            micro_batches=1,
            recomputed=0,
            batch_bytes=0,
        )

    def _predicted(
        self, division: MicroBatches, mode: str, demand: DeviceDemand, slices: Sequence[int]
    ) -> Prediction:
        shape = PlanShape(1, 1, division.chunks, "gpipe", mode)
        layers, costs = len(self.model), self.costs_of(division.rows)
        part = costs.partition(0, layers, demand.recomputed)
        work = division.chunks * (part.forward + part.backward) + demand.recomputed * part.recompute
        work += costs.update_ms([layers], shape.spec())
        copied = sum(map(self.link.ms, demand.copied_bytes(slices)))
        # Nothing overlaps with the copy of the first slice.
        step_ms = max(work, copied) + copied / max(1, 2 * len(slices))
        waiting = 1 - work / step_ms if step_ms else 0.0
        total, activations = demand.of(slices), demand.activations(slices)
        return Prediction(
            shape,
            tuple(slices),
            step_ms,
            lower_bound_ms=step_ms,
            bubble=waiting,
            batch_size=division.batch_size,
            memory=(PartitionMemory(total - activations, 0, 0, activations),),
            limit=Limit("transfers", waiting, {"transfers": waiting})
            if copied > work
            else Limit("work", 0.0, {}),
            engine=OFFLOAD,
            engine_memory=self.limit,
        )
