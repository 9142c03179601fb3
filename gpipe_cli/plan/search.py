"""The joint search: of all shapes and balances that fit, those with the shortest steps. Exact while time lasts.

A shape is everything that a plan decides besides its balance; `SearchSpace` has those to examine. The search takes
shapes by their lower bounds and prunes those whose bound exceeds the best plans found: first by a bound that costs
nothing, then by one that knows the layers and their memory. For one shape, every balance is ruled out by a bound or
simulated. A bound belongs to one partition, so it rules out all balances that have this partition in common. Pure
Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import inf
from typing import final

from gpipe_cli.balance.solver import best_nearby, minimize
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.step_time import MemoryFit, StepBound, can_simulate, least_step, step_ms
from gpipe_cli.schedule import ScheduleModule, names, traits
from gpipe_cli.schedule.action import Checkpoint
from gpipe_cli.schedule.spec import PipelineSpec

CHECKPOINTS = ("never", "except_last", "always")
FITTED = "fitted"
"""Not a mode: each partition has its own, the one with the least recomputation that fits its memory."""
TURNS = (2, 4)
"""Partitions per device for a schedule that runs several; with one it is the same as one that does not."""
Balance = tuple[int, ...]
MAX_ACTIONS_PER_SHAPE = 200_000
"""Simulating so many takes half a second."""
SHARE_OF_SHAPE = 0.25
"""The share of the time left that the search may take for one shape."""
ROUNDING = 1 - 1e-9
"""Bounds and steps add the same numbers in other orders."""
NEARBY = 24
MAX_SEGMENTS = 300_000
"""Checking so many partitions one by one takes a second."""
MAX_LAYERS = 256
"""If memory must hold more, groups of a few layers are divided instead."""


@final
@dataclass(frozen=True)
class PlanShape:
    partitions: int
    devices: int
    chunks: int
    schedule: str | ScheduleModule
    """By its name, or an order that was searched for."""
    checkpoint: Checkpoint
    """FITTED: depends on the balance."""

    def spec(self, cores: int | None = None) -> PipelineSpec:
        return PipelineSpec(self.schedule, self.partitions, self.chunks, self.checkpoint, self.devices, cores)

    @property
    def schedule_name(self) -> str:
        return traits(self.schedule).name

    @property
    def is_plain(self) -> bool:
        """Whether this is training without a pipeline."""
        return self.devices == 1 and self.checkpoint == "never"

    @property
    def actions(self) -> int:
        return 2 * self.partitions * self.chunks


@final
@dataclass(frozen=True)
class SearchSpace:
    """What a plan may choose from."""

    layers: int
    devices: Sequence[int]
    """The numbers of devices that may be used."""
    chunks: Sequence[int]
    schedules: Collection[str] = field(default_factory=lambda: searched_schedules())
    checkpoints: Collection[str] = CHECKPOINTS
    partitions: int | None = None
    """None: any number."""
    fitted: bool = False
    """Whether partitions may differ in what they recompute: worth searching if memory is limited."""
    _turns: Sequence[int] = field(default=TURNS)

    def shapes(self) -> Iterator[PlanShape]:
        """Each once; those that cannot run, or equal another one, are left out."""
        for devices in self.devices:
            for chunks in self.chunks:
                if devices == 1:
                    yield from self._on_one_device(chunks)
                elif chunks > 1:  # a single micro-batch keeps one device busy at a time
                    yield from self._pipelines(devices, chunks)

    def _on_one_device(self, chunks: int) -> Iterator[PlanShape]:
        plain = [
            name
            for name in self.schedules
            if not (traits(name).splits_backward or traits(name).several_per_device)
        ]
        if self.partitions not in (None, 1) or not plain:
            return
        # On one device all of them take the same time, so the one that keeps the fewest micro-batches alive is best.
        schedule = min(plain, key=lambda name: PipelineSpec(name, 1, chunks).peaks[0].bytes(graph=1, input=0))
        for checkpoint in self._modes(chunks):
            yield PlanShape(1, 1, chunks, schedule, checkpoint)

    def _pipelines(self, devices: int, chunks: int) -> Iterator[PlanShape]:
        for schedule in self.schedules:
            for turns in self._turns if traits(schedule).several_per_device else (1,):
                partitions = devices * turns
                if partitions > self.layers or self.partitions not in (None, partitions):
                    continue
                modes = self._modes(chunks)
                for checkpoint in [*modes, FITTED] if self.fitted and len(modes) > 1 else modes:
                    yield PlanShape(partitions, devices, chunks, schedule, checkpoint)

    def _modes(self, chunks: int) -> list[str]:
        """With one micro-batch `except_last` equals `never`, so it is left out if that may be chosen."""
        modes = [mode for mode in CHECKPOINTS if mode in self.checkpoints]
        return [mode for mode in modes if not (chunks == 1 and mode == "except_last" and "never" in modes)]


def searched_schedules() -> list[str]:
    """All shipped ones, simple ones first: of equally good plans the first is shown."""
    return sorted(names(), key=lambda name: (traits(name).several_per_device, traits(name).splits_backward))


def powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


@final
@dataclass(frozen=True)
class BestBalance:
    balance: Balance
    checkpoint: Checkpoint
    step_ms: float
    lower_bound_ms: float
    """No balance of this shape that fits has a shorter step; the step itself if all of them were judged."""


@final
@dataclass(frozen=True)
class RankedPlan:
    """The best balance of one shape; the shape says what each partition recomputes."""

    shape: PlanShape
    best: BestBalance


def simplest_of_equals(plans: list[RankedPlan], tolerance: float) -> list[RankedPlan]:
    """The plans with the simplest of those that are equally good, within the tolerance, in front.

    Measured times differ by as much from one run to the next; what is simple does not.
    """
    if not plans:
        return []
    enough = (1 + tolerance) * plans[0].best.step_ms
    simplest = min((plan for plan in plans if plan.best.step_ms <= enough), key=_complexity)
    return [simplest, *(plan for plan in plans if plan is not simplest)]


def _complexity(plan: RankedPlan) -> tuple[object, ...]:
    shape = plan.shape
    own = traits(shape.schedule)
    modes = shape.checkpoint if isinstance(shape.checkpoint, str) else "by partition"
    # Recomputing costs time, so a plan that recomputes and is as good has no simpler reason to be.
    recomputes = ("never", "except_last", "always", "by partition").index(modes)
    return (
        shape.devices,
        shape.partitions,
        own.several_per_device,
        own.splits_backward,
        recomputes,
        shape.chunks,
        shape.schedule_name,
    )


@final
@dataclass(frozen=True)
class SearchResult:
    plans: list[RankedPlan]
    """Shortest step first; no other shape is better than the last of them."""
    lower_bound_ms: float
    """No plan that fits has a shorter step."""
    too_large: int
    """Shapes for which no balance fits."""
    left_out: int
    """Shapes that cannot be simulated, or that there was no time for."""
    late: int = 0
    """The latter alone; those that cannot beat the plans that were found do not count."""
    judged: int = 0
    """Shapes of which a balance was found, or none that fits."""

    @property
    def gap(self) -> float:
        """By how much a better plan may beat the best one."""
        return self.plans[0].best.step_ms / self.lower_bound_ms - 1 if self.plans else inf


@final
@dataclass(frozen=True)
class _QueuedShape:
    shape: PlanShape
    costs: LayerCosts
    fit: MemoryFit | None = None
    start: tuple[float, Balance] | None = None
    """What `lowest_bound` gave; None until the layers were examined."""


_Entry = tuple[float, int, _QueuedShape]
"""A bound of the shape's step, and a number that makes it unique."""


def search(
    shapes: Iterable[PlanShape],
    costs_of: Callable[[PlanShape], LayerCosts],
    fit_of: Callable[[PlanShape], MemoryFit],
    *,
    keep: int,
    cores: int | None = None,
    deadline: float = inf,
    worst_ms: float = inf,
    least: int = 1,
) -> SearchResult:
    """The best `keep` shapes, each with its best balance; `deadline` is a time of `time.monotonic`.

    Steps longer than `worst_ms` are not worth finding. `least` plans are found however late it is.
    """
    all_shapes = list(shapes)
    queue = _queue(all_shapes, costs_of, cores)
    left_out = len(all_shapes) - len(queue)
    plans: list[RankedPlan] = []
    too_large, number, late, judged = 0, len(all_shapes), 0, 0
    # Best first: the smallest bound in the queue bounds everything that is left, so the search ends when that cannot
    # beat the last plan to keep.
    while queue and queue[0][0] <= worst_ms:
        if len(plans) >= keep and queue[0][0] >= plans[keep - 1].best.step_ms:
            break
        is_late = time.monotonic() > deadline
        if is_late and len(plans) >= least:
            worst_kept = plans[:keep][-1].best.step_ms if plans else inf
            late = sum(bound < worst_kept for bound, *_ in queue)
            break
        bound, _, queued = _next(queue, is_late=is_late)
        spec = queued.shape.spec(cores)
        if queued.fit is None or queued.start is None:
            fit = fit_of(queued.shape)
            start = lowest_bound(queued.costs, spec, fit)
            if start is None:
                too_large, judged = too_large + 1, judged + 1
            else:
                number += 1
                # Queued again with its tighter bound: most shapes are pruned by one of the two and never simulated.
                heappush(queue, (max(bound, start[0]), number, replace(queued, fit=fit, start=start)))
            continue
        now = time.monotonic()
        until = now + SHARE_OF_SHAPE * max(0.0, deadline - now)
        best = best_balance(queued.costs, spec, queued.fit, queued.start, MAX_ACTIONS_PER_SHAPE, until)
        judged += 1
        plan = RankedPlan(replace(queued.shape, checkpoint=best.checkpoint), best)
        # A fitted shape whose partitions all recompute the same is also in the space under that mode.
        if all(plan.shape != other.shape for other in plans):
            plans.append(plan)
            plans.sort(key=lambda plan: plan.best.step_ms)
    bounds = [plan.best.lower_bound_ms for plan in plans] + [bound for bound, *_ in queue[:1]]
    return SearchResult(
        plans[:keep], min(bounds, default=inf), too_large, left_out + late, late=late, judged=judged
    )


def _queue(
    shapes: Iterable[PlanShape], costs_of: Callable[[PlanShape], LayerCosts], cores: int | None
) -> list[_Entry]:
    """The shapes that can be simulated, as a heap."""
    queue: list[_Entry] = []
    for number, shape in enumerate(shapes):
        spec = shape.spec(cores)
        if can_simulate(spec):
            costs = costs_of(shape)
            queue.append((least_step(costs, spec), number, _QueuedShape(shape, costs)))
    heapify(queue)
    return queue


def _next(queue: list[_Entry], *, is_late: bool) -> _Entry:
    """The shape with the smallest bound; once it is late, of those that were examined, which become plans at once."""
    examined = [entry for entry in queue if entry[-1].start is not None] if is_late else []
    if not examined:
        return heappop(queue)
    first = min(examined)
    queue.remove(first)
    heapify(queue)
    return first


def lowest_bound(costs: LayerCosts, spec: PipelineSpec, fit: MemoryFit) -> tuple[float, Balance] | None:
    """A bound below all balances that fit, and a balance near it; None if none fits."""
    if fit.only is None and costs.layers > MAX_LAYERS:
        return _bound_of_groups(costs, spec, fit)
    solution = minimize(StepBound(costs, spec, fit), spec.partitions)
    return None if solution is None else (solution.largest, tuple(solution.balance))


def _bound_of_groups(costs: LayerCosts, spec: PipelineSpec, fit: MemoryFit) -> tuple[float, Balance] | None:
    """`lowest_bound` for very many layers, which memory must hold: it divides groups of a few layers."""
    length = max(1, costs.layers // max(MAX_LAYERS, 4 * spec.partitions))
    borders = sorted({*range(0, costs.layers, length), costs.frozen_layers, costs.layers})
    bound = minimize(StepBound(costs, spec, fit.without_limit), spec.partitions)
    solution = minimize(StepBound(costs.grouped(borders), spec, fit.grouped(borders)), spec.partitions)
    if solution is None or bound is None:
        return None
    ends = [borders[end] for end in accumulate(solution.balance)]
    return bound.largest, tuple(end - begin for begin, end in pairwise([0, *ends]))


def best_balance(
    costs: LayerCosts,
    spec: PipelineSpec,
    fit: MemoryFit,
    start: tuple[float, Balance],
    budget: int,
    deadline: float = inf,
) -> BestBalance:
    """The balance with the shortest step, exact as long as time and budget last.

    `start` is what `lowest_bound` gave; `budget` is how many actions may be simulated.
    """
    bound, balance = start
    actions = 2 * spec.partitions * spec.micro_batches
    checkpoint_of = cache(fit.checkpoint)

    @cache
    def price(balance: Balance) -> float:
        checkpoint = checkpoint_of(balance)
        assert checkpoint is not None, "a balance that does not fit is not judged"
        return step_ms(replace(spec, checkpoint=checkpoint), costs, balance)

    def result(balance: Balance, bound: float) -> BestBalance:
        checkpoint = checkpoint_of(balance)
        assert checkpoint is not None
        return BestBalance(balance, checkpoint, price(balance), min(bound, price(balance)))

    best = best_nearby(
        balance,
        lambda balance: checkpoint_of(balance) is not None,
        price,
        budget=max(1, min(NEARBY, budget // actions)),
    )
    if spec.partitions * costs.layers**2 > MAX_SEGMENTS or time.monotonic() > deadline:
        return result(best, bound)
    candidates = _Candidates(costs, spec, fit, price(best))
    for number, other in enumerate(candidates.balances()):
        if number * actions > budget or time.monotonic() > deadline:
            return result(best, bound)
        if price(other) < price(best):
            best = other
            candidates.limit = price(best) * ROUNDING
    # Every balance was ruled out or simulated, so the step itself is the bound.
    return result(best, inf)


@final
class _Candidates:
    """The balances that no partition rules out. `limit` may be lowered while they are enumerated."""

    def __init__(self, costs: LayerCosts, spec: PipelineSpec, fit: MemoryFit, limit: float) -> None:
        self.limit = limit * ROUNDING
        self._layers, self._partitions = costs.layers, spec.partitions
        self._bound = StepBound(costs, spec, fit)
        # For each partition where it may begin so that it and the later ones can hold the rest.
        self._reachable = [set[int]() for _ in range(self._partitions)] + [{self._layers}]
        # From the last partition to the first, in at most partitions x layers^2 bounds: then no enumeration ends in a
        # dead end unless `limit` has been lowered since.
        for partition in reversed(range(self._partitions)):
            begins = range(partition, self._layers) if partition else (0,)
            self._reachable[partition] = {
                begin for begin in begins if next(self._ends(partition, begin), None) is not None
            }

    def balances(self, partition: int = 0, begin: int = 0) -> Iterator[Balance]:
        """The balances of the partitions from `partition` on, which begin at layer `begin`."""
        if partition == self._partitions:
            yield ()
            return
        for end in self._ends(partition, begin):
            for rest in self.balances(partition + 1, end):
                yield (end - begin, *rest)

    def _ends(self, partition: int, begin: int) -> Iterator[int]:
        """Where the partition may end so that the later ones can reach the last layer."""
        following = self._reachable[partition + 1]
        for end in range(begin + 1, self._layers + 1):
            if self._bound.cost(partition, begin, end) >= self.limit:
                return  # it grows with every layer
            if end in following:
                yield end
