"""engine=offload as a plan, for a model that no pipeline of the devices can hold: its slices, memory and time.

Each slice runs all micro-batches before the next one comes. In a step every slice comes to the device twice, for
forward and for backward, the second time with the optimizer's state, and its new weights and state go back. Copies
and computation overlap, so the slower of the two decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import final

import torch
from torch import nn

from gpipe_cli.build.optimizer import optimizer_factory
from gpipe_cli.config.schema import PlanConfig, TrainConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.sizing import DeviceDemand, device_demand, layer_bytes
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.plan.costs import LayerCosts, TransferCost
from gpipe_cli.plan.plan_memory import PlanMemory
from gpipe_cli.plan.prediction import OFFLOAD, Limit, Prediction
from gpipe_cli.plan.search import PlanShape
from gpipe_cli.profiling.memory import PartitionMemory
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.action import checkpointed_counts


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
            samples_per_second=1000 * division.batch_size / step_ms if step_ms else 0.0,
            memory=(PartitionMemory(total - activations, 0, 0, activations),),
            limit=Limit("transfers", waiting, {"transfers": waiting})
            if copied > work
            else Limit("work", 0.0, {}),
            engine=OFFLOAD,
            engine_memory=self.limit,
        )
