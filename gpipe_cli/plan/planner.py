"""Search for the best plans of a configuration, for `gpipe plan` and `gpipe train plan=auto`.

The search respects the keys you give: it varies chunks, schedule, checkpoint and partitions only where you did not
choose them. With a limit of memory, `gpipe plan` also varies the batch size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, inf, log10
from typing import final

import torch
from torch import nn

from gpipe_cli.accelerator.devices import available_cores, default_partitions, resolve_devices
from gpipe_cli.activity import activity
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.build.step import autocast_of, make_loss, memory_limit
from gpipe_cli.config.schema import PlanConfig, TrainConfig
from gpipe_cli.config.words import override_key, sets_key
from gpipe_cli.engines.protocol import Batch
from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.estimated import EstimatedCosts, estimated_devices
from gpipe_cli.plan.measured import EQUALLY_GOOD, MEASURING_SHARE, MeasuredSource
from gpipe_cli.plan.order_plans import CONSIDERED_PLANS, MemoryPoint, OrderPlanner
from gpipe_cli.plan.order_problem import OrderProblem
from gpipe_cli.plan.plan_memory import MicroBatches, OffloadPlanner, PlanMemory, PlanSizes
from gpipe_cli.plan.prediction import Prediction, best_and_plain, by_recommendation, predict, preferring
from gpipe_cli.plan.search import (
    CHECKPOINTS,
    FITTED,
    PlanShape,
    RankedPlan,
    SearchResult,
    SearchSpace,
    powers_of_two,
    search,
    searched_schedules,
    simplest_of_equals,
)
from gpipe_cli.plan.step_time import MemoryFit
from gpipe_cli.profiling.profile_cache import default_folder
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule import traits
from gpipe_cli.schedule.orders import AUTO, FILE
from gpipe_cli.values import format_bytes

FEW_DEVICES = 8
"""Up to this many devices the search tries every number of partitions, above it powers of two."""
SEARCH_SHARE = 0.7
"""The share of the time left for the search among fixed schedules; searching for orders has the rest."""
MUCH_SLOWER = 2.0
"""Times as long for a sample: a batch size that is so much worse than another is not shown."""
COMPARED = 24
"""The least number of plans to compare: the simplest of those that are equally good may be none of the very best."""


@final
@dataclass(frozen=True)
class Coverage:
    """How much there was time for."""

    sizes: int
    measured: int
    """Of the sizes of micro-batches."""
    candidates: int
    searched: int
    """Of the combinations of devices, chunks, schedule and checkpoint mode, those that were judged or ruled out."""
    budget: float
    """The seconds that would have sufficed for all."""

    @property
    def is_complete(self) -> bool:
        return self.measured == self.sizes and self.searched == self.candidates

    def __str__(self) -> str:
        measured = f"measured {self.measured} of {self.sizes} sizes, " if self.measured < self.sizes else ""
        searched = f"searched {self.searched} of {self.candidates} candidates"
        return f"{measured}{searched}; plan.budget={self.budget:g} does all"


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
    rejected_chunks: list[int]
    """The latter alone."""
    origin: str
    """How the costs were obtained."""
    plain_bytes: int | None = None
    """What the run without a pipeline would need at least, if that is too much."""
    coverage: Coverage | None = None
    memory_curve: list[MemoryPoint] = field(default_factory=list)
    """The bubble of the best pipeline's searched orders against memory."""


@final
class Planner:
    def __init__(
        self,
        settings: PlanConfig | TrainConfig,
        overrides: Sequence[str],
        loader: BatchLoader,
        model: nn.Sequential,
        began: float | None = None,
    ) -> None:
        """`began` is when the time that planning may take began, by `time.monotonic`; by default now."""
        self._settings, self._overrides, self._loader, self._model = settings, overrides, loader, model
        self._began = time.monotonic() if began is None else began
        self._search_until = self._deadline = self._began + settings.plan.budget
        estimated = estimated_devices(settings) if isinstance(settings, PlanConfig) else None
        # A run of several replicas is planned by its engine's keys; only an estimate has a pipeline of each.
        self._replicas = settings.data_parallel if settings.plans else 1
        self._searched = self._judged = 0
        """How many candidates were judged or ruled out, and how many of them were judged."""
        # Before anything is measured, because they may be refused.
        self._schedules, self._checkpoints = self._possible_schedules(), self._possible_checkpoints()
        self._loss = make_loss(settings)
        self._is_estimated = estimated is not None
        if estimated is not None:
            self.devices = [torch.device("cpu")] * len(estimated.runs)
        else:
            partitions = settings.partitions or default_partitions(settings.devices)
            self.devices = resolve_devices(settings.devices, partitions)
        # For gpipe plan, devices=4 on a CPU means four machines like this one; devices=[cpu,cpu] means workers that
        # share the cores of this machine.
        on_cpu = all(device.type == "cpu" for device in self.devices)
        self.separate_machines = on_cpu and settings.plans and isinstance(settings.devices, int)
        shares_cores = on_cpu and not self.separate_machines and estimated is None
        self._cores = available_cores() if shares_cores else None
        given = memory_limit(settings)
        limits = [] if given is None else [given] * len(self.devices)
        self._source: EstimatedCosts | MeasuredSource
        if estimated is not None and isinstance(settings, PlanConfig):
            self._memory = PlanMemory(settings, model, self.sample, limits or estimated.memory)
            self._source = EstimatedCosts(settings, model, estimated, self._memory, self.sample)
        else:
            measured = MeasuredSource(
                model,
                self.devices,
                sample_of=self.sample,
                stats_of=lambda rows: self._memory.stats(rows),
                autocast=partial(autocast_of, settings),
                folder=default_folder(),
                reuse=settings.plan.cache,
                apart=self.separate_machines,
            )
            self._memory = PlanMemory(settings, model, self.sample, limits or measured.memory)
            self._source = measured
        self._sizes = PlanSizes(
            settings,
            overrides,
            loader,
            self._memory,
            devices=len(self.devices),
            replicas=self._replicas,
            estimated=self._is_estimated,
        )

    @property
    def can_be_run(self) -> bool:
        return not self._is_estimated and not self.separate_machines

    def batch(self, batch_size: int) -> Batch:
        """A mini-batch to run plans with."""
        return next(replace(self._loader, batch_size=batch_size).in_order("train"))

    def sample(self, rows: int) -> Sample:
        """A micro-batch."""
        return Sample(*self._loader.measured_batch(rows), self._loss)

    def plan(self, keep: int) -> Planned:
        if not any(map(self._shapes, self._sizes.batch_sizes)):
            raise ConfigError(f"no plan is possible with {self._fixed_keys()}; remove some of these keys")
        before = time.monotonic() - self._began
        known = self._source.prepare(self._sizes.to_measure(), self._deadline)
        begin = time.monotonic()
        self._search_until = begin + SEARCH_SHARE * max(0.0, self._deadline - begin)
        planned: list[Planned] = []
        # Large ones first: mostly they are better, and rule out most plans of the smaller ones at once.
        for batch_size in reversed(self._sizes.batch_sizes):
            if planned and time.monotonic() > self._search_until:
                break
            best = max((plan.plans[0].samples_per_second for plan in planned), default=0.0)
            worst_ms = MUCH_SLOWER * 1000 * batch_size / best if best else inf
            if (plan := self._plan_for(batch_size, known, max(keep, CONSIDERED_PLANS), worst_ms)) is not None:
                planned.append(plan)
        if planned:
            coverage = self._coverage(before, time.monotonic() - begin)
            return replace(self._best(planned, keep), coverage=coverage)
        if not any(self._shapes(batch_size, known) for batch_size in self._sizes.batch_sizes):
            raise ConfigError(
                f"plan.budget={self._settings.plan.budget}: too short to measure what {self._fixed_keys()} needs"
            )
        if self._replicas > 1:  # engine=offload has none
            raise self._refusal(known)
        return self._offloaded(known)

    def _shapes(self, batch_size: int, known: Collection[int] | None = None) -> list[PlanShape]:
        """What a plan may be; `known`: the rows of the micro-batches whose costs are known, by default all."""
        return [
            shape
            for shape in self._space(batch_size).shapes()
            if known is None or self._sizes.rows(batch_size, shape.chunks) in known
        ]

    def _best(self, planned: Sequence[Planned], keep: int) -> Planned:
        """That of the batch size with the most samples per second, with the best plans of the others."""
        most = max(each.plans[0].samples_per_second for each in planned)
        enough = most / (1 + self._tolerance)
        # Of batch sizes that are equally good the smallest, which also leaves the most memory.
        best = next(each for each in reversed(planned) if each.plans[0].samples_per_second >= enough)
        others = [each.plans[0] for each in planned if each is not best]
        others.sort(key=lambda plan: -plan.samples_per_second)
        best = self._with_orders(best)
        first, *rest = best_and_plain(best.plans, keep)
        return replace(best, plans=[first, *others, *rest])

    def _coverage(self, before: float, searching: float) -> Coverage:
        """`before` is the time before anything was measured, `searching` what the search took."""
        accepted = {size.rows for size in self._sizes.to_measure()} - set(self._source.rejected)
        candidates = sum(len(self._shapes(size, accepted)) for size in self._sizes.batch_sizes)
        measuring = self._source.seconds_for_all
        search = searching * (1 + (candidates - self._searched) / max(1, self._judged)) / SEARCH_SHARE
        enough = before + max(measuring / MEASURING_SHARE, measuring + search)
        return Coverage(
            len(accepted),
            len(accepted.intersection(self._source.complete)),
            candidates,
            self._searched,
            rounded_up(max(enough, self._settings.plan.budget)),
        )

    def _plan_for(self, batch_size: int, known: Sequence[int], keep: int, worst_ms: float) -> Planned | None:
        """The best plans with this batch size; None if none fits."""
        rows_of = partial(self._sizes.rows, batch_size)
        skipped = [chunks for chunks in self._sizes.chunks(batch_size) if rows_of(chunks) not in known]
        shapes = self._shapes(batch_size, known)
        if not shapes:
            return None
        activity.now(
            f"searching {len(shapes)} combinations of devices, chunks, schedule and checkpoint mode"
            + (f" for batch_size={batch_size}" if self._sizes.chooses_batch_size else "")
        )

        def costs(shape: PlanShape) -> LayerCosts:
            return self._source.costs(rows_of(shape.chunks), shape.devices)

        def fit(shape: PlanShape) -> MemoryFit:
            return self._memory.fit(shape, rows_of(shape.chunks))

        find = partial(search, costs_of=costs, cores=self._cores, deadline=self._search_until)
        # Every plan is compared with the run without a pipeline. Without a limit of memory, judging it takes no time.
        plain, is_limited = [shape for shape in shapes if shape.is_plain], self._memory.limit is not None
        is_too_large = is_limited and self._memory.resident_bytes > self._memory.limits[0]
        judged = find([] if is_too_large else plain, fit_of=fit, keep=1, least=int(not is_limited))
        compared = keep if self._is_estimated or self._sizes.chooses_batch_size else max(keep, COMPARED)
        # If that fits, recomputing on the same device only takes longer, whatever the measurements say.
        sensible = [shape for shape in shapes if shape.devices > 1 or shape.is_plain or not judged.plans]
        searched = find(sensible, fit_of=fit, keep=compared, worst_ms=worst_ms, least=int(worst_ms == inf))
        self._searched += len(shapes) - searched.late
        self._judged += searched.judged
        if not searched.plans:
            return None
        plans = simplest_of_equals(searched.plans, self._tolerance)[:keep]
        if not any(plan.shape.is_plain for plan in plans):
            plans += judged.plans
        best_free_ms = self._without_limit(shapes, find)
        predictions = [
            self._predicted(plan, costs(plan.shape), batch_size, best_free_ms if place == 0 else None)
            for place, plan in enumerate(plans)
            if place == 0 or plan.shape.is_plain or time.monotonic() < self._deadline
        ]
        plain_bytes = None
        if plain and is_too_large:
            plain_bytes = self._memory.resident_bytes
        elif plain and judged.too_large == len(plain):
            plain_bytes = self._bytes_of(plain[0], batch_size)
        return Planned(
            by_recommendation(predictions),
            searched,
            costs,
            self._cores,
            skipped,
            [chunks for chunks in skipped if rows_of(chunks) in self._source.rejected],
            self._source.origin,
            plain_bytes,
        )

    def _with_orders(self, planned: Planned) -> Planned:
        """Add plans with orders that are searched for, if there is time."""
        given = self._given("schedule")
        wanted = not given or self._settings.schedule.name == AUTO
        if time.monotonic() > self._deadline and not (given and wanted):
            return planned
        activity.now("searching for orders")
        plans, simplest = planned.plans, planned.plans[0]

        def problems(plan: Prediction, costs: LayerCosts) -> list[OrderProblem]:
            rows = self._sizes.rows(simplest.batch_size, plan.shape.chunks)
            return self._memory.order_problems(plan, costs, rows, self._cores)

        def predicted(plan: RankedPlan, costs: LayerCosts, without_limit_ms: float | None) -> Prediction:
            return self._predicted(plan, costs, simplest.batch_size, without_limit_ms)

        orders = OrderPlanner(problems, predicted, self._cores, self._deadline)
        if wanted:
            plans = orders.added_to(plans, planned.costs, only=given)
            # An order that is searched for is worth it if it is better by more than the noise.
            plans = preferring(simplest, by_recommendation(plans))
        return replace(planned, plans=plans, memory_curve=orders.memory_curve(plans, planned.costs))

    def _without_limit(self, shapes: Sequence[PlanShape], find: Callable[..., SearchResult]) -> float | None:
        """The step time of the best plan without the memory limit, or None if there is no limit, or no time."""
        if self._memory.limit is None or time.monotonic() > self._deadline:
            return None
        shapes = [shape for shape in shapes if shape.checkpoint != FITTED]
        found = find(shapes, fit_of=lambda shape: MemoryFit({str(shape.checkpoint): None}), keep=1)
        return found.plans[0].best.step_ms

    def _predicted(
        self, plan: RankedPlan, costs: LayerCosts, batch_size: int, without_limit_ms: float | None
    ) -> Prediction:
        prediction = predict(
            plan,
            costs,
            self._memory.of(plan.shape, plan.best.balance, self._sizes.rows(batch_size, plan.shape.chunks)),
            cores=self._cores,
            batch_size=batch_size,
            without_limit_ms=without_limit_ms,
        )
        return replace(
            prediction,
            chose_batch_size=self._sizes.chooses_batch_size,
            devices=self._names[: plan.shape.devices],
            device_memory=min(self._memory.limits[: plan.shape.devices], default=None),
        )

    def _bytes_of(self, plain: PlanShape, batch_size: int) -> int:
        (memory,) = self._memory.of(plain, [len(self._model)], self._sizes.rows(batch_size, plain.chunks))
        return memory.total_bytes

    def _offloaded(self, known: Sequence[int]) -> Planned:
        """With slices of the model on one device, since no pipeline fits."""
        divisions = [
            MicroBatches(batch_size, rows, chunks)
            for batch_size in self._sizes.batch_sizes
            for chunks in self._sizes.chunks(batch_size)
            if (rows := self._sizes.rows(batch_size, chunks)) in known
        ]
        assert self._memory.limits, "only a limit forbids plans"
        planner = OffloadPlanner(
            self._settings,
            self._model,
            self.devices[0],
            self._memory,
            self._memory.limits[0],
            self._source.host_transfer(),
            self.sample,
            lambda rows: self._source.costs(rows, 1),
        )
        best = planner.best(divisions, self._checkpoints)
        if best is None:
            raise ConfigError(
                f"{self._refusal(known)}; engine=offload, with one layer on the device at a time, needs "
                f"{format_bytes(planner.least_bytes(divisions))}"
            )
        best = replace(best, chose_batch_size=self._sizes.chooses_batch_size)
        result = SearchResult([], best.step_ms, too_large=len(divisions), left_out=0)
        costs = planner.costs_of(self._sizes.rows(best.batch_size, best.shape.chunks))
        return Planned([best], result, lambda shape: costs, self._cores, [], [], self._source.origin)

    def _refusal(self, known: Sequence[int]) -> ConfigError:
        """What the least demanding pipeline would need."""
        batch_size = self._sizes.batch_sizes[-1]
        shapes = self._shapes(batch_size, known)
        modest = [shape for shape in shapes if shape.checkpoint == "always"] or shapes
        return self._memory.refusal(modest[-1], self._sizes.rows(batch_size, modest[-1].chunks))

    @property
    def _tolerance(self) -> float:
        """Times that differ by less count as equal: measurements vary, estimates do not."""
        return 0.0 if self._is_estimated else EQUALLY_GOOD

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """The devices that a command to train must name: it would choose others."""
        if self._is_estimated or self.devices == resolve_devices("auto", len(self.devices)):
            return ()
        return tuple(map(str, self.devices))

    def _space(self, batch_size: int) -> SearchSpace:
        settings, most = self._settings, len(self.devices)
        numbers = range(1, most + 1) if most <= FEW_DEVICES else {*powers_of_two(most), most}
        return SearchSpace(
            len(self._model),
            sorted(number for number in numbers if number <= len(self._model)),
            self._sizes.chunks(batch_size),
            self._schedules,
            self._checkpoints,
            settings.partitions,
            fitted=self._memory.limit is not None,
        )

    def _possible_schedules(self) -> list[str]:
        """Replicas are processes, which torch's schedules drive. Orders are searched for the best of their plans."""
        name = self._settings.schedule.name
        if self._given("schedule") and name == FILE:
            raise ConfigError(
                f"schedule={name}: gpipe plan compares schedules; remove it, and use gpipe train schedule={name} to "
                "see what its order will take"
            )
        if self._given("schedule") and name != AUTO:
            return [name]
        searched = searched_schedules()
        return [name for name in searched if self._replicas == 1 or traits(name).torch_schedule is not None]

    def _possible_checkpoints(self) -> Sequence[str]:
        if not self._given("checkpoint"):
            return CHECKPOINTS
        mode = self._settings.checkpoint
        if not isinstance(mode, str):
            raise ConfigError(f"checkpoint={mode}: gpipe plan finds a mode for each partition; remove it")
        return [mode]

    def _given(self, key: str) -> bool:
        return sets_key(self._overrides, key)

    def _fixed_keys(self) -> str:
        keys = ("chunks", "schedule", "checkpoint", "partitions", "devices", "device_memory")
        return " ".join(word for word in self._overrides if override_key(word) in keys)


def rounded_up(seconds: float) -> float:
    """To one of the next numbers that people would write: 61 is 65, 247 is 250."""
    unit: float = 10 ** int(log10(max(1.0, seconds))) / 2
    return unit * ceil(seconds / unit)
