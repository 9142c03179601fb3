"""What a training run takes from the planner: the best plan for plan=auto, and the order of a custom schedule.

The best plan becomes part of the settings and of the saved config.yaml, so that a resumed run continues with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, final

import torch
from torch import nn

from gpipe_cli.accelerator.device_errors import is_out_of_memory
from gpipe_cli.accelerator.devices import available_cores, is_accelerator
from gpipe_cli.build.components import check_components, engine_name, manual_balance, traits_of_engine
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.build.optimizer import kept_state, optimizer_factory
from gpipe_cli.build.parts import BuiltModel, build_model
from gpipe_cli.build.step import autocast_of, make_sample, memory_limit, sample_must_fit
from gpipe_cli.config.job import Job
from gpipe_cli.config.schema import AutoPlanConfig, ModelConfig, ScheduleConfig, TrainConfig
from gpipe_cli.config.targets import add_current_folder
from gpipe_cli.config.words import sets_key
from gpipe_cli.errors import ConfigError
from gpipe_cli.launch.rank import is_rank
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.measured import measure_costs, measure_link, room_to_measure
from gpipe_cli.plan.order_plans import order_problems, search_order
from gpipe_cli.plan.order_search import SEARCHED
from gpipe_cli.plan.planner import Planner
from gpipe_cli.plan.prediction import OFFLOAD, advice, percent
from gpipe_cli.profiling.memory import with_bytes
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.profile_cache import ProfileCache, default_folder
from gpipe_cli.profiling.records import Sample, frozen_layers, has_values
from gpipe_cli.report.output import print_status
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.orders import AUTO, similar_schedule
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec

NO_PLAN = AutoPlanConfig()
PLANS = 5
"""How many plans to keep: the advice compares the best one with the run on a single device, if that is among them."""


@final
@dataclass(frozen=True)
class PlannedRun:
    """The run that plan=auto makes of another."""

    settings: TrainConfig
    job: Job
    """With the configuration that contains the plan."""
    built: BuiltModel | None
    """The data and the model that were measured; None if the engine builds them in another way."""
    order: FixedOrder | None
    """The order that was searched for with the plan; None if the plan has another schedule."""


def with_best_plan(settings: TrainConfig, job: Job) -> PlannedRun:
    """Search for the best plan of a run."""
    if is_rank():
        raise ConfigError(
            "plan=auto: every process that torchrun started would search for its own plan; "
            "run gpipe plan once and use the command it prints"
        )
    if job.dry_run:
        raise ConfigError("plan=auto: measures the model, and --dry-run runs nothing; remove one of them")
    traits = traits_of_engine(settings)
    if not traits.has_partitions:
        raise ConfigError(
            f"plan=auto: has no effect with {engine_name(settings)}, which has no partitions; remove it"
        )
    if sets_key(job.overrides, "balance"):
        raise ConfigError("balance: plan=auto searches for it; remove one of them")
    add_current_folder(settings.allow)
    check_components(settings, job.overrides)
    built = build_model(settings, initial_weights=settings.resume is None)
    began = job.began if not job.in_sweep else time.monotonic()
    planner = Planner(settings, job.overrides, built.loader, built.made.sequence, began)
    planned = planner.plan(keep=PLANS)
    best = planned.plans[0]
    if best.engine == OFFLOAD:
        raise ConfigError(f"plan=auto: {advice(planned.plans)}; train with {best.overrides}")
    print_status(
        f"plan ({planned.origin}): {best.step_ms:.1f} ms per step predicted; {advice(planned.plans)}"
    )
    print_status(f"plan: {best.overrides}")
    shape = best.shape
    if isinstance(shape.schedule, FixedOrder):
        gain = _gain_of_order(shape.spec(planned.cores), best.parts, best.spread, "{:.1f} ms".format)
        print_status(f"plan: schedule=auto is an order that was searched for, {gain}")
    keys: dict[str, Any] = {
        "balance": manual_balance(best.balance),
        "chunks": shape.chunks,
        "checkpoint": best.checkpoint,
        "partitions": shape.partitions,
        "devices": [str(device) for device in planner.devices[: shape.devices]],
        "schedule": ScheduleConfig(shape.schedule_name),
        "plan": NO_PLAN,
    }
    if shape.schedule_name == AUTO and best.device_memory is not None:
        # A resumed run may search for the order again, and must keep to the same limit.
        keys["device_memory"] = best.device_memory
    return PlannedRun(
        replace(settings, **keys),
        job.with_values(replaces=True, **keys),
        None if traits.needs_processes else built,
        shape.schedule if isinstance(shape.schedule, FixedOrder) else None,
    )


def choose_order(
    settings: ModelConfig,
    model: nn.Sequential,
    loader: BatchLoader,
    balance: Sequence[int],
    devices: Sequence[torch.device],
    spec: PipelineSpec,
) -> FixedOrder:
    """Search for the order of schedule=auto, or check that of schedule=file; print what it will take."""
    began = time.monotonic()
    measured = _Costs.of(settings, model, loader, devices, spec)
    costs = measured.partitions(settings, model, balance, spec)
    if settings.schedule.name == AUTO:
        limit = memory_limit(settings)
        searched = search_order(order_problems(spec, costs, [] if limit is None else [limit] * len(devices)))
        order, bound = searched.schedule, searched.result.bound
        name = "schedule=auto"
        origin = searched.result.origin
        chosen = "an order of its own, " if origin == SEARCHED else f"the order of {origin}, "
    else:
        assert isinstance(spec.schedule, FixedOrder), "read from the file"
        order, bound, chosen = spec.schedule, None, ""
        name = f"schedule.path={settings.schedule.path}"
    with_order = replace(spec, schedule=order, devices=len(devices))
    gain = _gain_of_order(with_order, costs, measured.layers.spread, measured.format)
    if bound is not None:
        gap = max(0.0, with_order.simulate(costs).step / bound - 1)
        gain += f"; lower bound {measured.format(bound)}, gap {100 * gap:.1f} %"
    print_status(f"{name} ({measured.origin}, {time.monotonic() - began:.1f} s): {chosen}{gain}")
    return order


def _gain_of_order(
    spec: PipelineSpec, costs: Sequence[PartitionCost], spread: float, unit: Callable[[float], str]
) -> str:
    """The predicted step of an order beside that of the usual schedule; `spread` is that of the measurements."""
    usual = replace(spec, schedule=similar_schedule(spec.partitions, spec.devices or spec.partitions))
    step, expected = spec.simulate(costs), usual.simulate(costs)
    gain = expected.step / step.step - 1
    uncertain = f" (measurements of the same differ by {percent(spread)})" if 0 < spread < inf else ""
    return (
        f"{unit(step.step)} per step predicted, bubble {100 * step.bubble:.1f} %; {usual.schedule}: "
        f"{unit(expected.step)}, bubble {100 * expected.bubble:.1f} %; "
        + (f"gain {100 * gain:.1f} %" if gain > spread else "no measurable gain")
        + uncertain
    )


@final
@dataclass(frozen=True)
class _Costs:
    """What the layers cost, and where that is known from."""

    layers: LayerCosts
    stats: ModelStats | None
    """None if sizes depend on values, and the model has none."""
    origin: str
    in_milliseconds: bool

    @staticmethod
    def of(
        settings: ModelConfig,
        model: nn.Sequential,
        loader: BatchLoader,
        devices: Sequence[torch.device],
        spec: PipelineSpec,
    ) -> _Costs:
        sample = make_sample(settings, loader)
        if not has_values(model):
            return _estimated(settings, model, sample, "the model is not run here")
        try:
            return _measured(settings, model, sample, devices, spec)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return _estimated(settings, model, sample, "its layers do not fit on one device")

    def format(self, duration: float) -> str:
        return f"{duration:.1f} ms" if self.in_milliseconds else f"{duration:.4g} FLOPs"

    def partitions(
        self, settings: ModelConfig, model: nn.Sequential, balance: Sequence[int], spec: PipelineSpec
    ) -> list[PartitionCost]:
        """Durations and bytes of each partition."""
        times = self.layers.partitions(balance, spec)
        if self.stats is None:
            return times
        kept = kept_state(settings)
        optimizer = optimizer_factory(settings, model)
        return with_bytes(times, model, self.stats, balance, optimizer, kept, self.layers.frozen_layers)


def _stats(
    settings: ModelConfig, model: nn.Sequential, sample: Sample, *, count_flops: bool
) -> ModelStats | None:
    with sample_must_fit(sample), autocast_of(settings):
        try:
            return model_stats(model, sample, count_flops=count_flops)
        except ConfigError:
            return None


def _estimated(settings: ModelConfig, model: nn.Sequential, sample: Sample, reason: str) -> _Costs:
    stats = _stats(settings, model, sample, count_flops=True)
    # One more for each layer: those that only move data have none, and still take time.
    flops = [(1.0, 1.0)] * len(model)
    if stats is not None:
        flops = [(1.0 + layer.forward_flops, 1.0 + layer.backward_flops) for layer in stats.operations]
    forward, backward = (list(column) for column in zip(*flops, strict=True))
    layers = LayerCosts(forward, backward, frozen_layers=frozen_layers(model, sample))
    return _Costs(layers, stats, f"estimated from FLOPs, since {reason}", False)


def _measured(
    settings: ModelConfig,
    model: nn.Sequential,
    sample: Sample,
    devices: Sequence[torch.device],
    spec: PipelineSpec,
) -> _Costs:
    reuse = settings.plan.cache if isinstance(settings, TrainConfig) else True
    profiles = ProfileCache(default_folder(), reuse=reuse, warn=print_status)
    print_status(f"schedule={settings.schedule.name}: measuring the layers and a short pipeline of them")
    stats = _stats(settings, model, sample, count_flops=False)
    transfer = None
    if stats is not None and is_accelerator(devices[0]):
        link = measure_link(devices[0], devices[-1])
        transfer = [link.ms(stats.boundary(end).bytes) for end in range(1, len(model) + 1)]
    with autocast_of(settings, devices[0].type), sample_must_fit(sample):
        measured = measure_costs(
            model,
            sample.to(devices[0]),
            devices,
            profiles,
            chunks=spec.micro_batches,
            cores=available_cores(),
            layers=None if stats is None else stats.layer_sample(room_to_measure(devices)),
        )
    origin = "costs measured" if profiles.oldest is None else f"costs of {profiles.oldest}, confirmed now"
    return _Costs(measured.costs(transfer), stats, origin, True)
