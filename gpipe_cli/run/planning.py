"""Search for the best plans of a configuration, for `gpipe plan` and `gpipe train plan=auto`.

The search respects the keys you give: it varies chunks, schedule, checkpoint and partitions only where you did not
choose them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import final

import torch
from torch import nn

from gpipe_cli.accelerator.devices import (
    available_cores,
    default_partitions,
    is_accelerator,
    resolve_devices,
)
from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.size import memory_objective_from_facts
from gpipe_cli.config.overrides import override_key, sets_key
from gpipe_cli.config.schema import PlanConfig, TrainConfig
from gpipe_cli.engines.protocol import Batch
from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.bound import MemoryFit
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.measured import CostMeasurer, intra_op_threads
from gpipe_cli.plan.order_plans import OrderPlanner
from gpipe_cli.plan.order_search import MemoryPoint, order_problems
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
from gpipe_cli.profiling.partition_memory import partition_memory, with_bytes
from gpipe_cli.report.output import print_status
from gpipe_cli.run.data import BatchLoader
from gpipe_cli.run.estimated_devices import EstimatedDevices, estimated_devices, layer_updates
from gpipe_cli.run.optimizer import kept_state, optimizer_factory
from gpipe_cli.run.training_step import (
    autocast_of,
    make_sample,
    memory_limit,
    sample_must_fit,
    trained_bytes,
)
from gpipe_cli.schedule import traits
from gpipe_cli.schedule.own_orders import AUTO, FILE
from gpipe_cli.schedule.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.search_problem import SearchProblem

MAX_CHUNKS_PER_DEVICE = 8
"""Above this the bubble is only a few per cent, and small micro-batches are slow."""
FEW_DEVICES = 8
"""Up to this many devices the search tries every number of partitions, above it powers of two."""
LINK_BYTES_PER_SECOND = 12e9
"""Between machines or GPUs whose link is not measured: PCIe 3.0 x16."""
MEASURING_SHARE = 0.8
"""Of the budget; the search has the rest."""


@final
@dataclass(frozen=True)
class Planned:
    plans: list[Prediction]
    """Best first."""
    searched: SearchResult
    costs: Callable[[PlanShape], LayerCosts]
    cores: int | None
    skipped_chunks: list[int]
    """Values of `chunks` that the search skipped, because the time ran out or the model rejects them."""
    origin: str
    """How the costs were obtained."""
    memory_curve: list[MemoryPoint]
    """The bubble of the best pipeline's searched orders against memory."""


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
        self._estimated = estimated_devices(settings) if isinstance(settings, PlanConfig) else None
        # A run of several replicas is planned by its engine's keys; only an estimate has a pipeline of each.
        self._replicas = settings.data_parallel if isinstance(settings, PlanConfig) else 1
        self.devices = self._devices()
        # For gpipe plan, devices=4 on a CPU means four machines like this one; devices=[cpu,cpu] means workers that
        # share the cores of this machine.
        on_cpu = self.devices[0].type == "cpu"
        self.separate_machines = (
            on_cpu and isinstance(settings, PlanConfig) and isinstance(settings.devices, int)
        )
        shares_cores = on_cpu and not self.separate_machines and self._estimated is None
        self._cores = available_cores() if shares_cores else None
        self._facts = cache(self._facts_of)
        self._memory_of = cache(self._memory_with)
        self._smallest: tuple[int, MemoryObjective] | None = None
        """For an estimate: the largest number of chunks whose operations were counted, and its memory."""

    @property
    def can_be_run(self) -> bool:
        return self._estimated is None and not self.separate_machines

    def plan(self, keep: int) -> Planned:
        deadline = time.monotonic() + self._settings.plan.budget
        space = self._space()
        measured, costs, origin = self._costs(space.chunks, deadline)
        skipped = [chunks for chunks in space.chunks if chunks not in measured]
        shapes = [shape for shape in space.shapes() if shape.chunks in measured]
        if not shapes:
            raise ConfigError(f"no plan is possible with {self._fixed_keys()}; leave some of these keys out")
        print_status(f"searching {len(shapes)} combinations of devices, chunks, schedule and checkpoint mode")
        searched = search(shapes, costs, self._fit, keep=keep, cores=self._cores, deadline=deadline)
        if not searched.plans:
            # No plan fits: say what the least demanding one would need.
            modest = [shape for shape in shapes if shape.checkpoint == "always"] or shapes
            memory = self._memory(modest[-1])
            assert memory is not None, "a shape that fits is not refused"
            raise ConfigError(
                f"{memory.refusal()}; engine=offload needs less, with one slice of the model on the device at a time"
            )
        best, *others = searched.plans
        plans = [self._predicted(best, costs(best.shape), self._without_limit(shapes, costs, deadline))]
        others += self._plain_if_missing(shapes, costs, searched)
        plans += [self._predicted(answer, costs(answer.shape), None) for answer in others]
        orders = OrderPlanner(self._order_problems, self._predicted, self._cores)
        if not self._given("schedule") or self._settings.schedule.name == AUTO:
            plans = orders.added_to(plans, costs, keep, only=self._given("schedule"))
        curve = orders.memory_curve(plans, costs)
        return Planned(plans, searched, costs, self._cores, skipped, origin, curve)

    def _plain_if_missing(
        self, shapes: Sequence[PlanShape], costs: Callable[[PlanShape], LayerCosts], searched: SearchResult
    ) -> list[RankedPlan]:
        """The run without a pipeline, which every plan is compared with, unless it is too large or among the best."""
        plain = [shape for shape in shapes if shape.is_plain]
        if any(plan.shape.is_plain for plan in searched.plans):
            return []
        return search(plain, costs, self._fit, keep=1, cores=self._cores).plans

    def batch(self) -> Batch:
        """A mini-batch to run plans with."""
        return next(self._loader.in_order("train"))

    def sample(self, chunks: int) -> Sample:
        return make_sample(self._settings, self._loader, chunks * self._replicas)

    def _devices(self) -> list[torch.device]:
        settings = self._settings
        if self._estimated is not None:
            return [torch.device("cpu")] * len(self._estimated.runs)
        return resolve_devices(settings.devices, settings.partitions or default_partitions(settings.devices))

    def _space(self) -> SearchSpace:
        settings, most = self._settings, len(self.devices)
        numbers = range(1, most + 1) if most <= FEW_DEVICES else {*powers_of_two(most), most}
        chunks = powers_of_two(self._batch_size)
        if self._estimated is None:
            chunks = [count for count in chunks if count <= MAX_CHUNKS_PER_DEVICE * most]
        return SearchSpace(
            len(self._model),
            sorted(number for number in numbers if number <= len(self._model)),
            [min(settings.chunks, self._batch_size)] if self._given("chunks") else chunks,
            self._schedules(),
            [self._checkpoint] if self._given("checkpoint") else CHECKPOINTS,
            settings.partitions,
            fitted=self._limit() is not None,
        )

    def _schedules(self) -> list[str]:
        """Replicas are processes, which torch's schedules drive. Orders are searched for the best of their plans."""
        name = self._settings.schedule.name
        if self._given("schedule") and name == FILE:
            raise ConfigError(
                f"schedule={name}: gpipe plan compares schedules; leave it out, and use gpipe train schedule={name} to "
                "see what its order will take"
            )
        if self._given("schedule") and name != AUTO:
            return [name]
        searched = searched_schedules()
        return [name for name in searched if self._replicas == 1 or traits(name).torch_schedule is not None]

    def _costs(
        self, chunks: Sequence[int], deadline: float
    ) -> tuple[Sequence[int], Callable[[PlanShape], LayerCosts], str]:
        """Measure or estimate: the values of `chunks` with known costs, the costs, and how they were obtained."""
        if self._estimated is not None:
            return self._estimates(chunks, self._estimated)
        profiles = ProfileCache(default_folder(), reuse=self._settings.plan.cache, say=print_status)
        bench = CostMeasurer(
            self._model,
            self.sample,
            self.devices,
            profiles,
            cores=available_cores(),
            apart=self.separate_machines,
            transfer_of=self._transfers
            if self.separate_machines or is_accelerator(self.devices[0])
            else None,
            say=print_status,
        )
        begin = time.monotonic()
        precision = autocast_of(self._settings, self.devices[0].type)
        with precision, sample_must_fit(self.sample(max(chunks))), intra_op_threads(1):
            measured = bench.measure(chunks, begin + MEASURING_SHARE * (deadline - begin))
        if profiles.outdated:
            print_status(
                f"measured again: {len(profiles.outdated)} outdated cached measurements, such as {profiles.outdated[0]}"
            )
        if profiles.oldest is None:
            origin = f"measured here in {time.monotonic() - begin:.1f} s"
        else:
            origin = (
                f"measured here, some of it on {profiles.oldest} and confirmed now; "
                "plan.cache=false measures everything again"
            )
        return measured, bench.costs, origin

    @property
    def _batch_size(self) -> int:
        """Of one replica."""
        return max(1, self._settings.batch_size // self._replicas)

    def _estimates(
        self, chunks: Sequence[int], devices: EstimatedDevices
    ) -> tuple[Sequence[int], Callable[[PlanShape], LayerCosts], str]:
        """Count operations once, for the smallest micro-batch that the model accepts: they grow with its rows."""
        rows = {count: -(-self._batch_size // count) for count in chunks}
        with autocast_of(self._settings):
            number, counted = self._counted(sorted(chunks, reverse=True))
        self._smallest = number, self._memory_from(counted, number)
        updates, shared_bytes = layer_updates(self._model, self._trained)

        @cache
        def costs(count: int) -> LayerCosts:
            return devices.costs(counted, rows[count] / rows[number], updates, shared_bytes)

        origin = f"an estimate for {devices.name}, not measured"
        return [count for count in chunks if count <= number], lambda shape: costs(shape.chunks), origin

    def _counted(self, chunks: Sequence[int]) -> tuple[int, ModelFacts]:
        """The first of these values of `chunks` whose micro-batch the model accepts, and its operations."""
        for number in chunks[:-1]:
            try:
                return number, model_facts(self._model, self.sample(number))
            except ValueError:
                # Batch norm, for example, rejects a micro-batch of a single row.
                continue
        return chunks[-1], model_facts(self._model, self.sample(chunks[-1]))

    def _transfers(self, chunks: int) -> list[float]:
        """Milliseconds to transfer the output of each layer."""
        facts = self._facts(chunks)
        return [
            1000 * facts.boundary(end).bytes / LINK_BYTES_PER_SECOND for end in range(1, len(self._model) + 1)
        ]

    def _facts_of(self, chunks: int) -> ModelFacts:
        sample = self.sample(chunks)
        with autocast_of(self._settings), sample_must_fit(sample):
            return model_facts(self._model, sample, count_flops=False)

    def _limit(self) -> int | None:
        """Of one device, or the largest of those that differ."""
        limit = memory_limit(self._settings)
        return max(self._estimated.memory) if limit is None and self._estimated is not None else limit

    def _limits(self) -> Sequence[int]:
        """Of devices that differ."""
        if memory_limit(self._settings) is not None or self._estimated is None:
            return ()
        memory = self._estimated.memory
        return memory if min(memory) < max(memory) else ()

    @property
    def _checkpoint(self) -> str:
        mode = self._settings.checkpoint
        if not isinstance(mode, str):
            raise ConfigError(f"checkpoint={mode}: gpipe plan finds a mode for each partition; leave it out")
        return mode

    def _fit(self, shape: PlanShape) -> MemoryFit:
        modes = CHECKPOINTS if shape.checkpoint == FITTED else (str(shape.checkpoint),)
        return MemoryFit({mode: self._memory(replace(shape, checkpoint=mode)) for mode in modes})

    def _memory(self, shape: PlanShape) -> MemoryObjective | None:
        """The memory of the partitions, or None if the whole model fits, which is quicker to check."""
        if self._limit() is None or self._surely_fits(shape):
            return None
        memory = self._memory_of(shape.chunks).under(shape.spec())
        whole = (memory.allows(partition, 0, len(self._model)) for partition in range(shape.partitions))
        return None if all(whole) else memory

    def _surely_fits(self, shape: PlanShape) -> bool:
        """Decide from a smaller micro-batch: twice the rows save at most twice as many bytes for backward."""
        if self._smallest is None:
            return False
        known_chunks, memory = self._smallest
        assert memory.limit is not None, "called only if there is a limit"
        rows, known_rows = (-(-self._batch_size // chunks) for chunks in (shape.chunks, known_chunks))
        times = -(-rows // known_rows)
        most = memory.most(graphs=times * (shape.chunks + 1), inputs=times * shape.chunks)
        limit = min(self._limits(), default=memory.limit)
        return most <= limit / shape.spec().partitions_per_device

    def _memory_with(self, chunks: int) -> MemoryObjective:
        return self._memory_from(self._facts(chunks), chunks)

    def _memory_from(self, facts: ModelFacts, chunks: int) -> MemoryObjective:
        return memory_objective_from_facts(
            self._model, facts, PipelineSpec("gpipe", 1, chunks), self._trained, self._limit(), self._limits()
        )

    @cached_property
    def _trained(self) -> Callable[[nn.Parameter], int]:
        return trained_bytes(self._settings, self._model)

    def _without_limit(
        self, shapes: Sequence[PlanShape], costs: Callable[[PlanShape], LayerCosts], deadline: float
    ) -> float | None:
        """The step time of the best plan without the memory limit, or None if there is no limit."""
        if self._limit() is None:
            return None
        shapes = [shape for shape in shapes if shape.checkpoint != FITTED]
        searched = search(
            shapes,
            costs,
            lambda shape: MemoryFit({str(shape.checkpoint): None}),
            keep=1,
            cores=self._cores,
            deadline=deadline,
        )
        return searched.plans[0].best.step_ms

    def _order_problems(self, plan: Prediction, costs: LayerCosts) -> list[SearchProblem]:
        """The search for an order of a plan's balance."""
        shape = plan.shape
        spec = shape.spec(self._cores)
        parts = with_bytes(
            costs.partitions(plan.balance, spec),
            self._model,
            self._facts(shape.chunks),
            plan.balance,
            optimizer_factory(self._settings, self._model),
            kept_state(self._settings),
            costs.frozen_layers,
        )
        limit = min(self._limits(), default=self._limit())
        return order_problems(spec, parts, limit, equal_devices=costs.equal_devices)

    def _predicted(self, answer: RankedPlan, costs: LayerCosts, without_limit_ms: float | None) -> Prediction:
        shape = answer.shape
        memory = partition_memory(
            self._model,
            self._facts(shape.chunks),
            answer.best.balance,
            shape.spec(),
            optimizer_factory(self._settings, self._model),
            kept_state(self._settings),
        )
        return predict(
            answer,
            costs,
            memory,
            cores=self._cores,
            rows=self._settings.batch_size,
            without_limit_ms=without_limit_ms,
        )

    def _given(self, key: str) -> bool:
        return sets_key(self._overrides, key)

    def _fixed_keys(self) -> str:
        keys = ("chunks", "schedule", "checkpoint", "partitions", "devices", "device_memory")
        return " ".join(word for word in self._overrides if override_key(word) in keys)
