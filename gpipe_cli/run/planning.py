"""From settings to plans: which shapes there are, what their layers cost, what they need. For `plan` and `train`.

Keys that are given are kept: chunks, schedule, checkpoint and partitions are searched for only where nobody chose them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import final

import torch
from torch import nn

from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.size import memory_objective_from_facts
from gpipe_cli.config.schema import PlanConfig, TrainConfig
from gpipe_cli.config.targets import instantiate
from gpipe_cli.engines.devices import available, available_cores, default_partitions, resolve_devices
from gpipe_cli.engines.protocol import Batch
from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.bound import MemoryFit
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.devices import DEVICES, DeviceSpec, estimate_costs
from gpipe_cli.plan.measured import CostMeasurer, intra_op_threads
from gpipe_cli.plan.prediction import Prediction, predict
from gpipe_cli.plan.search import RankedPlan, SearchResult, search
from gpipe_cli.plan.search_space import (
    CHECKPOINTS,
    FITTED,
    PlanShape,
    SearchSpace,
    powers_of_two,
    searched_schedules,
)
from gpipe_cli.profiling.cache import ProfileCache, default_folder
from gpipe_cli.profiling.facts import ModelFacts, model_facts
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.partition_memory import partition_memory
from gpipe_cli.report.output import print_status
from gpipe_cli.run.data import BatchLoader
from gpipe_cli.run.training_step import (
    autocast_of,
    memory_limit,
    optimizer_factory,
    sample_must_fit,
    trained_bytes,
)
from gpipe_cli.schedule.pipeline_spec import PipelineSpec

__all__ = ["Planned", "Planner"]

MOST_CHUNKS = 8
"""Micro-batches per device that are measured: beyond that a bubble is a few per cent, and small ones are slow."""
SEVERAL = 8
"""Up to so many devices every number of them is tried, beyond it powers of two."""
LINK = 12e9
"""Bytes per second between devices that are not here, if nothing else is said: PCIe 3.0 x16."""
MEASURING = 0.8
"""The share of the budget after which the search begins."""


@final
@dataclass(frozen=True)
class Planned:
    plans: list[Prediction]
    """From the best on."""
    searched: SearchResult
    costs: Callable[[PlanShape], LayerCosts]
    cores: int | None
    left_out: list[int]
    """Numbers of micro-batches for which there was no time."""
    origin: str


@final
class Planner:
    def __init__(
        self,
        settings: PlanConfig | TrainConfig,
        overrides: Sequence[str],
        loader: BatchLoader,
        model: nn.Sequential,
    ) -> None:
        self._settings, self._overrides, self._loader, self._model = settings, overrides, loader, model
        name = settings.device if isinstance(settings, PlanConfig) else None
        self._elsewhere: DeviceSpec | None = DEVICES[name] if name else None
        self.devices = self._here()
        # Who only plans may mean machines like this one by a number; workers that share this one are a list of cpu.
        counted = isinstance(settings, PlanConfig) and isinstance(settings.devices, int)
        self.apart = counted and self.devices[0].type == "cpu"
        shares = not self.apart and self.devices[0].type == "cpu"
        self._cores = available_cores() if shares and self._elsewhere is None else None
        self._facts = cache(self._facts_of)
        self._memory_of = cache(self._memory_with)
        self._seen: tuple[int, MemoryObjective] | None = None
        """The memory of micro-batches whose facts came with their operations, and how many of those there are."""

    @property
    def can_be_run(self) -> bool:
        return self._elsewhere is None and not self.apart

    def plan(self, keep: int) -> Planned:
        deadline = time.monotonic() + self._settings.plan.budget
        space = self._space()
        measured, costs, origin = self._costs(space.chunks, deadline)
        left_out = [one for one in space.chunks if one not in measured]
        shapes = [shape for shape in space.shapes() if shape.chunks in measured]
        if not shapes:
            raise ConfigError(f"nothing to choose from: {self._pinned_text()}; leave some of it out")
        found = search(shapes, costs, self._fit, keep=keep, cores=self._cores, deadline=deadline)
        if not found.plans:
            raise self._refusal(shapes)
        best, *others = found.plans
        plans = [self._predicted(best, costs(best.shape), self._without_limit(shapes, costs, deadline))]
        plans += [self._predicted(one, costs(one.shape), None) for one in others]
        return Planned(plans, found, costs, self._cores, left_out, origin)

    def batch(self) -> Batch:
        """A mini-batch to run plans with."""
        return next(self._loader.in_order("train"))

    def sample(self, chunks: int) -> Sample:
        settings = self._settings
        input, target = self._loader.micro_batch(chunks)
        return Sample(input, target, instantiate(settings.loss, "loss", settings.allow))

    def _here(self) -> list[torch.device]:
        settings = self._settings
        if self._elsewhere is not None:
            return [torch.device("cpu")] * int(settings.devices)
        count = settings.partitions or default_partitions(settings.devices)
        if isinstance(settings.devices, int) and not torch.cuda.is_available():
            count = settings.devices
        return (
            resolve_devices(settings.devices, count)
            if settings.devices == "auto"
            else available(settings.devices)
        )

    def _space(self) -> SearchSpace:
        settings, most = self._settings, len(self.devices)
        numbers = range(1, most + 1) if most <= SEVERAL else {*powers_of_two(most), most}
        chunks = powers_of_two(settings.batch_size)
        if self._elsewhere is None:
            chunks = [one for one in chunks if one <= MOST_CHUNKS * most]
        return SearchSpace(
            len(self._model),
            sorted(one for one in numbers if one <= len(self._model)),
            [min(settings.chunks, settings.batch_size)] if self._given("chunks") else chunks,
            [settings.schedule.name] if self._given("schedule") else searched_schedules(),
            [self._checkpoint] if self._given("checkpoint") else CHECKPOINTS,
            settings.partitions,
            fitted=self._limit() is not None,
        )

    def _costs(
        self, chunks: Sequence[int], deadline: float
    ) -> tuple[Sequence[int], Callable[[PlanShape], LayerCosts], str]:
        """The numbers of micro-batches whose costs are known, the costs, and where they come from."""
        if self._elsewhere is not None:
            return self._estimates(chunks)
        profiles = ProfileCache(default_folder(), reuse=self._settings.plan.cache, say=print_status)
        bench = CostMeasurer(
            self._model,
            self.sample,
            self.devices,
            profiles,
            cores=available_cores(),
            apart=self.apart,
            transfer_of=self._transfers if self.apart or self.devices[0].type == "cuda" else None,
        )
        begin = time.monotonic()
        precision = autocast_of(self._settings, self.devices[0].type)
        with precision, sample_must_fit(self.sample(max(chunks))), intra_op_threads(1):
            measured = bench.measure(chunks, begin + MEASURING * (deadline - begin))
        if profiles.outdated:
            print_status(
                f"measured again: {len(profiles.outdated)} cached measurements, such as {profiles.outdated[0]}"
            )
        if profiles.oldest is None:
            origin = f"measured here in {time.monotonic() - begin:.1f} s"
        else:
            origin = f"measured here, some of it on {profiles.oldest} and confirmed now; plan.cache=false measures anew"
        return measured, bench.costs, origin

    def _estimates(
        self, chunks: Sequence[int]
    ) -> tuple[Sequence[int], Callable[[PlanShape], LayerCosts], str]:
        """Operations are counted once, for the smallest micro-batch that runs: they grow with its rows."""
        assert self._elsewhere is not None
        rows = {one: -(-self._settings.batch_size // one) for one in chunks}
        number, counted = self._counted(sorted(chunks, reverse=True))
        self._seen = number, self._memory_from(counted, number)

        @cache
        def costs(count: int) -> LayerCosts:
            assert self._elsewhere is not None
            return estimate_costs(list(self._model), counted, self._elsewhere, rows[count] / rows[number])

        origin = (
            f"an estimate for {len(self.devices)} x {getattr(self._settings, 'device', '')}, nothing was run"
        )
        return [one for one in chunks if one <= number], lambda shape: costs(shape.chunks), origin

    def _counted(self, chunks: Sequence[int]) -> tuple[int, ModelFacts]:
        """The facts with operations of the first of these numbers of micro-batches that runs."""
        for number in chunks[:-1]:
            try:
                return number, model_facts(self._model, self.sample(number))
            except ValueError:
                # Batch norm, for one, takes no micro-batch of a single row.
                continue
        return chunks[-1], model_facts(self._model, self.sample(chunks[-1]))

    def _transfers(self, chunks: int) -> list[float]:
        """Milliseconds for the output of each layer."""
        facts = self._facts(chunks)
        return [1000 * facts.boundary(end).bytes / LINK for end in range(1, len(self._model) + 1)]

    def _facts_of(self, chunks: int) -> ModelFacts:
        sample = self.sample(chunks)
        with autocast_of(self._settings), sample_must_fit(sample):
            return model_facts(self._model, sample, count_flops=False)

    def _limit(self) -> int | None:
        limit = memory_limit(self._settings)
        return self._elsewhere.memory if limit is None and self._elsewhere is not None else limit

    @property
    def _checkpoint(self) -> str:
        given = self._settings.checkpoint
        if not isinstance(given, str):
            raise ConfigError(f"checkpoint={given}: gpipe plan finds a mode for each partition; leave it out")
        return given

    def _fit(self, shape: PlanShape) -> MemoryFit:
        modes = CHECKPOINTS if shape.checkpoint == FITTED else (str(shape.checkpoint),)
        return MemoryFit({mode: self._memory(replace(shape, checkpoint=mode)) for mode in modes})

    def _memory(self, shape: PlanShape) -> MemoryObjective | None:
        """None where even the whole model fits, which is quicker to see than that each partition does."""
        if self._limit() is None or self._surely_fits(shape):
            return None
        memory = self._memory_of(shape.chunks).under(shape.spec())
        whole = (memory.allows(partition, 0, len(self._model)) for partition in range(shape.partitions))
        return None if all(whole) else memory

    def _surely_fits(self, shape: PlanShape) -> bool:
        """Judged by a smaller micro-batch that has been looked at: twice the rows keep twice as much at most."""
        if self._seen is None:
            return False
        seen, memory = self._seen
        assert memory.limit is not None, "asked only where there is a limit"
        rows, seen_rows = (-(-self._settings.batch_size // one) for one in (shape.chunks, seen))
        times = -(-rows // seen_rows)
        most = memory.most(graphs=times * (shape.chunks + 1), inputs=times * shape.chunks)
        return most <= memory.limit / shape.spec().partitions_per_device

    def _memory_with(self, chunks: int) -> MemoryObjective:
        return self._memory_from(self._facts(chunks), chunks)

    def _memory_from(self, facts: ModelFacts, chunks: int) -> MemoryObjective:
        return memory_objective_from_facts(
            self._model, facts, PipelineSpec("gpipe", 1, chunks), self._trained, self._limit()
        )

    @cached_property
    def _trained(self) -> Callable[[nn.Parameter], int]:
        return trained_bytes(self._settings, self._model)

    def _without_limit(
        self, shapes: Sequence[PlanShape], costs: Callable[[PlanShape], LayerCosts], deadline: float
    ) -> float | None:
        """The best step if memory did not matter, where it does."""
        if self._limit() is None:
            return None
        shapes = [shape for shape in shapes if shape.checkpoint != FITTED]
        found = search(
            shapes,
            costs,
            lambda shape: MemoryFit({str(shape.checkpoint): None}),
            keep=1,
            cores=self._cores,
            deadline=deadline,
        )
        return found.plans[0].best.step_ms

    def _predicted(self, answer: RankedPlan, costs: LayerCosts, without_limit_ms: float | None) -> Prediction:
        shape = answer.shape
        memory = partition_memory(
            self._model,
            self._facts(shape.chunks),
            answer.best.balance,
            shape.spec(),
            optimizer_factory(self._settings),
        )
        return predict(
            answer,
            costs,
            memory,
            cores=self._cores,
            rows=self._settings.batch_size,
            without_limit_ms=without_limit_ms,
        )

    def _refusal(self, shapes: Sequence[PlanShape]) -> ConfigError:
        """No plan fits; say what the least demanding one would need."""
        modest = [shape for shape in shapes if shape.checkpoint == "always"] or list(shapes)
        memory = self._memory(modest[-1])
        assert memory is not None, "what fits is not refused"
        return memory.refusal()

    def _given(self, key: str) -> bool:
        return any(re.match(rf"[+~]*{key}[.=]", word) for word in self._overrides)

    def _pinned_text(self) -> str:
        keys = ("chunks", "schedule", "checkpoint", "partitions", "devices", "device_memory")
        return " ".join(word for word in self._overrides if word.partition("=")[0].lstrip("+") in keys)
