"""The order of schedule=auto and schedule=file as far as it is known without a search: read, checked and saved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpipe_cli.build.components import traits_of_engine
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.config.words import sets_key
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.report.output import print_status
from gpipe_cli.runs.directory import write_text
from gpipe_cli.schedule.files import FixedOrder, parse_schedule, read_schedule, schedule_text
from gpipe_cli.schedule.orders import AUTO, CUSTOM, FILE, one_by_one, similar_schedule
from gpipe_cli.schedule.spec import PipelineSpec

ORDER_FILE = "schedule.csv"
"""In the run directory; other runs and torch's pipelining can use it too."""


def has_custom_order(settings: ModelConfig) -> bool:
    """Whether the run needs an order that no module makes. Without backward, any schedule does the same."""
    trains_pipeline = bool(settings.optimizer and settings.engine) and settings.schedule.name in CUSTOM
    return trains_pipeline and traits_of_engine(settings).has_partitions


def _reads_file(settings: ModelConfig) -> bool:
    """Whether the order of schedule=file matters: for a run that has it, and for a balance that keeps within memory."""
    only_balances = not (settings.engine or settings.plans)
    return settings.schedule.name == FILE and (has_custom_order(settings) or only_balances)


def saved_order(run: Path, settings: ModelConfig, overrides: Sequence[str]) -> FixedOrder | None:
    """The order that a run was started with; None if it has none, or if the command line gives a schedule."""
    path = run / ORDER_FILE
    if sets_key(overrides, "schedule") or not has_custom_order(settings) or not os.path.lexists(path):
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
    if has_custom_order(settings):
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
    hints = []
    if order.partitions != partitions:
        hints.append(f"partitions={order.partitions}")
    if len(order.given) != devices:
        hints.append(f"devices={len(order.given) * replicas}")
    if order.chunks != micro_batches:
        is_given = settings.chunks == order.chunks  # but the mini-batch of a replica is too small for them
        hints.append("a larger batch_size" if is_given else f"chunks={order.chunks}")
    return ConfigError(
        f"schedule.path={settings.schedule.path}: the order is for {_described(order)}, and there are {partitions} "
        f"partitions on {devices} devices and {micro_batches} chunks; give {', '.join(hints)}"
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
