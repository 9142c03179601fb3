"""Describe one training step from the settings, before it runs: pipeline, sample, loss and its metrics, autocast,
optimizer and memory.

The order of schedule=auto and schedule=file belongs to it, as far as it is known without a search: read, checked and
saved with the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.determinism import report_nondeterministic_operator
from gpipe_cli.accelerator.device_errors import is_out_of_memory
from gpipe_cli.accelerator.devices import available_cores
from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.size import TrainedBytes, memory_objective
from gpipe_cli.build.components import traits_of_engine
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.build.optimizer import optimizer_factory
from gpipe_cli.config.instantiate import instantiate
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.config.words import sets_key
from gpipe_cli.engines.protocol import DTYPES
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.losses.measures import Measure, measure_of
from gpipe_cli.pipeline.loss import LossFunction, row_weights
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.profiling.memory import StateBytes, state_by_parameter
from gpipe_cli.profiling.records import Sample
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.runs.directory import write_text
from gpipe_cli.schedule import ScheduleModule
from gpipe_cli.schedule.action import Checkpoint, checked_checkpoint
from gpipe_cli.schedule.files import FixedOrder, parse_schedule, read_schedule, schedule_text
from gpipe_cli.schedule.orders import AUTO, CUSTOM, FILE, one_by_one, similar_schedule
from gpipe_cli.schedule.spec import PipelineSpec
from gpipe_cli.values import parse_bytes

RESERVED = (
    *("step", "epoch", "split", "loss", "loss_mean", "loss_min", "loss_max", "lr"),
    *("samples_per_second", "seconds", "grad_norm"),
)
"""Columns of metrics.jsonl that are no metrics of a loss."""
ORDER_FILE = "schedule.csv"
"""In the run directory; other runs and torch's pipelining can use it too."""


def make_pipeline_spec(
    settings: ModelConfig,
    loader: BatchLoader,
    partitions: int,
    devices: Sequence[torch.device],
    schedule: str | ScheduleModule,
) -> PipelineSpec:
    return PipelineSpec(
        schedule=schedule,
        partitions=partitions,
        micro_batches=loader.micro_batches(settings.chunks),
        checkpoint=checkpoint_mode(settings, partitions),
        devices=len(devices),
        cores=available_cores() if all(device.type == "cpu" for device in devices) else None,
    )


def checkpoint_mode(settings: ModelConfig, partitions: int) -> Checkpoint:
    """One mode for all partitions, or one for each; a command that does not train recomputes nothing."""
    try:
        return checked_checkpoint(settings.checkpoint, partitions)
    except ValueError as error:
        raise ConfigError(f"checkpoint={settings.checkpoint}: {error}") from error


def make_sample(settings: ModelConfig, loader: BatchLoader, chunks: int | None = None) -> Sample:
    """One micro-batch with its loss, to measure with; `chunks` instead of that of the settings, if given."""
    input, target = loader.micro_batch(settings.chunks if chunks is None else chunks)
    return Sample(input, target, make_loss(settings))


def make_loss(settings: ModelConfig) -> LossFunction:
    loss: LossFunction = instantiate(settings.loss, "loss", settings.allow)
    reduction = getattr(loss, "reduction", "mean")
    if reduction != "mean":
        raise ConfigError(
            f"loss.reduction={reduction}: must be mean, because gpipe weights the loss of each micro-batch by its size"
        )
    return loss


@contextmanager
def sample_must_fit(sample: Sample) -> Iterator[None]:
    """Report what torch raises over a sample of the wrong shape as an error in the settings, not in a layer."""
    try:
        with report_nondeterministic_operator():
            yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        shapes = " ".join("x".join(map(str, tensor.shape)) for tensor in tensors_of(sample.input))
        raise ConfigError(
            f"the model does not accept a micro-batch of {shapes}: {describe(error)}; choose data and a model that "
            "fit each other"
        ) from error


def autocast_of(settings: ModelConfig, device_type: str = "cpu") -> AbstractContextManager[Any]:
    """The autocast of the run. The default is for meta tensors, which torch treats as CPU tensors here."""
    dtype = DTYPES.get(settings.precision)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def make_memory(
    settings: ModelConfig, model: nn.Sequential, sample: Sample, spec: PipelineSpec
) -> MemoryObjective:
    """How much memory partitions of the model need, and the limit if there is one."""
    with autocast_of(settings):
        return memory_objective(model, sample, spec, trained_bytes(settings, model), memory_limit(settings))


def memory_limit(settings: ModelConfig) -> int | None:
    """Bytes that a device may use at most."""
    limit = settings.device_memory
    return None if limit is None else parse_bytes(limit)


def trained_bytes(settings: ModelConfig, model: nn.Sequential) -> TrainedBytes:
    """Bytes of a parameter with its gradient and, for a command with an optimizer, its optimizer state."""
    if not settings.optimizer:
        return with_gradient({})
    return with_gradient(state_by_parameter(optimizer_factory(settings, model), model))


def with_gradient(state: StateBytes) -> TrainedBytes:
    """Bytes of a parameter with its gradient and its optimizer state."""
    return lambda parameter: 2 * parameter.nbytes + state.get(parameter, 0)


@runtime_checkable
class LossWithMetrics(Protocol):
    """A custom loss, whose metrics are means, as is usual. Those of the losses of gpipe are sums."""

    def __call__(self, output: Any, target: Tensor, /) -> Tensor: ...
    def metrics(self, output: Any, target: Tensor, /) -> Mapping[str, Any]:
        """By name, the mean over the given samples, or a tensor with the value of each sample.

        If the loss has `row_weights`, the mean over what it counts.
        """


def metrics_of(loss: object) -> Measure:
    """The function that measures outputs, for an engine: it returns sums over what the loss is a mean of, which do not
    depend on how samples are divided into batches."""
    return partial(_sums, loss) if isinstance(loss, LossWithMetrics) else measure_of(loss)


def _sums(loss: LossWithMetrics, output: Any, target: Tensor) -> dict[str, float]:
    weights = row_weights(loss, target, len(target))
    metrics = loss.metrics(output, target)
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{_method(loss)}: must return a dict of names and values, not a {type(metrics).__name__}"
        )
    if taken := [name for name in metrics if name in RESERVED]:
        raise ConfigError(
            f"{_method(loss)}: '{taken[0]}' is the name of another column of metrics.jsonl; choose another"
        )
    return {str(name): _sum(loss, name, value, weights) for name, value in metrics.items()}


def _sum(loss: LossWithMetrics, name: Any, value: Any, weights: Tensor) -> float:
    total = float(weights.sum())
    if total == 0:  # the mean of nothing may be nan
        return 0.0
    values = (
        torch.as_tensor(value, dtype=torch.float64).detach()
        if isinstance(value, int | float | Tensor)
        else None
    )
    if values is not None and values.dim() == 0:
        return float(values) * total
    if values is not None and values.shape == weights.shape:
        return float((values * weights.to(values)).sum())
    given = f"a tensor of shape {list(values.shape)}" if values is not None else f"a {type(value).__name__}"
    raise ConfigError(
        f"{_method(loss)}: '{name}' must be a mean over the samples or a value for each of {len(weights)}, not {given}"
    )


def _method(loss: object) -> str:
    return f"loss._target_={type(loss).__module__}.{type(loss).__qualname__}.metrics"


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
