"""The order of schedule=auto and schedule=file: searched for or read, checked, timed, and saved with the run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import nn

from gpipe_cli.accelerator.device_errors import is_out_of_memory
from gpipe_cli.accelerator.devices import available_cores, is_accelerator
from gpipe_cli.build.components import traits_of_engine
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.build.optimizer import kept_state, optimizer_factory
from gpipe_cli.build.step import autocast_of, make_sample, memory_limit, sample_must_fit
from gpipe_cli.config.schema import (
    BalanceConfig,
    ModelConfig,
    TrainConfig,
)
from gpipe_cli.config.words import sets_key
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.links import measure_link
from gpipe_cli.plan.measured import measure_costs
from gpipe_cli.plan.order_plans import order_problems, search_order
from gpipe_cli.profiling.measurements import ProfileCache, default_folder
from gpipe_cli.profiling.memory import with_bytes
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import Sample, frozen_layers, has_values
from gpipe_cli.report.output import print_status
from gpipe_cli.run.measured_devices import room_to_measure
from gpipe_cli.runs.directory import write_text
from gpipe_cli.schedule.files import FixedOrder, parse_schedule, read_schedule, schedule_text
from gpipe_cli.schedule.orders import AUTO, CUSTOM, FILE, one_by_one, similar_schedule
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec

ORDER_FILE = "schedule.csv"
"""In the run directory; other runs and torch's pipelining can use it too."""


def has_own_order(settings: ModelConfig) -> bool:
    """Whether the run needs an order that no module makes. Without backward, any schedule does the same."""
    trains_pipeline = bool(settings.optimizer and settings.engine) and settings.schedule.name in CUSTOM
    return trains_pipeline and traits_of_engine(settings).has_partitions


def _reads_file(settings: ModelConfig) -> bool:
    """Whether the order of schedule=file matters: for a run that has it, and for a balance that keeps within memory."""
    return settings.schedule.name == FILE and (has_own_order(settings) or isinstance(settings, BalanceConfig))


def saved_order(run: Path, settings: ModelConfig, overrides: Sequence[str]) -> FixedOrder | None:
    """The order that a run was started with; None if it has none, or if the command line gives a schedule."""
    path = run / ORDER_FILE
    if sets_key(overrides, "schedule") or not has_own_order(settings) or not os.path.lexists(path):
        return None
    try:
        return read_schedule(path, base=run)
    except ConfigError as error:
        again = "schedule=auto" if settings.schedule.name == AUTO else "schedule=file schedule.path=<file>"
        raise RunError(f"{error}; repair it, or add {again}") from error


def write_order(run: Path, spec: PipelineSpec) -> None:
    """Save the order with the run, so that a resumed run repeats it, also after steps with an engine without one."""
    if text := order_text(spec):
        write_text(run / ORDER_FILE, text)


def order_text(spec: PipelineSpec) -> str:
    """The order as a CSV file has it; empty if a module makes it."""
    return schedule_text(spec.schedule.given, is_csv=True) if isinstance(spec.schedule, FixedOrder) else ""


def order_from_text(text: str) -> FixedOrder:
    """The order that `order_text` wrote."""
    return parse_schedule(text, AUTO, is_csv=True)


def known_schedule(
    settings: ModelConfig, given: FixedOrder | None, partitions: int, devices: int, micro_batches: int
) -> str | FixedOrder:
    """The schedule as far as it is known before the model is divided.

    given: the order of a launcher or of a resumed run. Until an order is searched for, a similar schedule stands for
    it.
    """
    name = settings.schedule.name
    if name not in CUSTOM:
        return name
    if _reads_file(settings):
        order = given or read_given_file(settings)
        if _numbers(order) != (partitions, devices, micro_batches):
            raise _wrong_numbers(settings, order, partitions, devices, micro_batches)
        return order
    if has_own_order(settings):
        return given or similar_schedule(partitions, devices)
    in_ranks = settings.runs_steps and traits_of_engine(settings).needs_processes
    if in_ranks and partitions > devices and (devices == 1 or partitions % devices):
        # torch has no schedule for that, and without backward any order does the same.
        return FixedOrder(name, one_by_one(partitions, micro_batches, devices))
    return similar_schedule(partitions, devices)


def _wrong_numbers(
    settings: ModelConfig, order: FixedOrder, partitions: int, devices: int, micro_batches: int
) -> ConfigError:
    replicas = settings.data_parallel
    cures = []
    if order.partitions != partitions:
        cures.append(f"partitions={order.partitions}")
    if len(order.given) != devices:
        cures.append(f"devices={len(order.given) * replicas}")
    if order.chunks != micro_batches:
        is_given = settings.chunks == order.chunks  # but the mini-batch of a replica is too small for them
        cures.append("a larger batch_size" if is_given else f"chunks={order.chunks}")
    return ConfigError(
        f"schedule.path={settings.schedule.path}: the order is for {_described(order)}, and there are {partitions} "
        f"partitions on {devices} devices and {micro_batches} chunks; give {', '.join(cures)}"
    )


def read_given_file(settings: ModelConfig) -> FixedOrder:
    """The order in the file of schedule=file."""
    assert settings.schedule.path is not None, "the configuration was checked"
    try:
        return read_schedule(settings.schedule.path)
    except ConfigError as error:
        raise ConfigError(f"schedule.path={error}") from error


def order_still_fits(order: FixedOrder, partitions: int, devices: int, chunks: int) -> bool:
    """Whether a run of schedule=auto can repeat its order; print why not."""
    if _numbers(order) == (partitions, devices, chunks):
        return True
    print_status(
        f"schedule=auto: the order of the run is for {_described(order)}, now there are {partitions} partitions on "
        f"{devices} devices and {chunks} chunks; searching again"
    )
    return False


def _numbers(order: FixedOrder) -> tuple[int, int, int]:
    return order.partitions, len(order.given), order.chunks


def _described(order: FixedOrder) -> str:
    return f"{order.partitions} partitions on {len(order.given)} devices and {order.chunks} chunks"


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
    else:
        assert isinstance(spec.schedule, FixedOrder), "read from the file"
        order, bound = spec.schedule, None
        name = f"schedule.path={settings.schedule.path}"
    simulated = replace(spec, schedule=order).simulate(costs)
    usual = replace(spec, schedule=similar_schedule(spec.partitions, len(devices)))
    expected = usual.simulate(costs)
    unit = measured.format
    print_status(
        f"{name} ({measured.origin}, {time.monotonic() - began:.1f} s): {unit(simulated.step)} per step predicted, "
        f"bubble {100 * simulated.bubble:.1f} %; {usual.schedule}: {unit(expected.step)}, "
        f"bubble {100 * expected.bubble:.1f} %"
        + (
            ""
            if bound is None
            else f"; lower bound {unit(bound)}, gap {100 * max(0.0, simulated.step / bound - 1):.1f} %"
        )
    )
    return order


@final
@dataclass(frozen=True)
class _Costs:
    """What the layers cost, and where that is known from."""

    layers: LayerCosts
    facts: ModelStats | None
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
        if self.facts is None:
            return times
        kept = kept_state(settings)
        optimizer = optimizer_factory(settings, model)
        return with_bytes(times, model, self.facts, balance, optimizer, kept, self.layers.frozen_layers)


def _facts(
    settings: ModelConfig, model: nn.Sequential, sample: Sample, *, count_flops: bool
) -> ModelStats | None:
    with sample_must_fit(sample), autocast_of(settings):
        try:
            return model_stats(model, sample, count_flops=count_flops)
        except ConfigError:
            return None


def _estimated(settings: ModelConfig, model: nn.Sequential, sample: Sample, reason: str) -> _Costs:
    facts = _facts(settings, model, sample, count_flops=True)
    # One more for each layer: those that only move data have none, and still take time.
    flops = [(1.0, 1.0)] * len(model)
    if facts is not None:
        flops = [(1.0 + layer.forward_flops, 1.0 + layer.backward_flops) for layer in facts.operations]
    forward, backward = (list(column) for column in zip(*flops, strict=True))
    layers = LayerCosts(forward, backward, frozen_layers=frozen_layers(model, sample))
    return _Costs(layers, facts, f"estimated from FLOPs, since {reason}", False)


def _measured(
    settings: ModelConfig,
    model: nn.Sequential,
    sample: Sample,
    devices: Sequence[torch.device],
    spec: PipelineSpec,
) -> _Costs:
    reuse = settings.plan.cache if isinstance(settings, TrainConfig) else True
    profiles = ProfileCache(default_folder(), reuse=reuse, say=print_status)
    print_status(f"schedule={settings.schedule.name}: measuring the layers and a short pipeline of them")
    facts = _facts(settings, model, sample, count_flops=False)
    transfer = None
    if facts is not None and is_accelerator(devices[0]):
        link = measure_link(devices[0], devices[-1])
        transfer = [link.ms(facts.boundary(end).bytes) for end in range(1, len(model) + 1)]
    with autocast_of(settings, devices[0].type), sample_must_fit(sample):
        measured = measure_costs(
            model,
            sample.to(devices[0]),
            devices,
            profiles,
            chunks=spec.micro_batches,
            cores=available_cores(),
            layers=None if facts is None else facts.layer_sample(room_to_measure(devices)),
        )
    origin = "costs measured" if profiles.oldest is None else f"costs of {profiles.oldest}, confirmed now"
    return _Costs(measured.costs(transfer), facts, origin, True)
