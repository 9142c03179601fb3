"""Describe one training step from the settings, before it runs: pipeline, sample, loss and its metrics, autocast,
optimizer and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.determinism import report_nondeterministic_operator
from gpipe_cli.accelerator.device_errors import is_out_of_memory
from gpipe_cli.accelerator.devices import available_cores
from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.size import TrainedBytes, memory_objective
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.build.optimizer import optimizer_factory
from gpipe_cli.config.instantiate import instantiate
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.engines.protocol import DTYPES
from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.measures import Measure, measure_of
from gpipe_cli.pipeline.loss import LossFunction, row_weights
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.profiling.memory import StateBytes, state_by_parameter
from gpipe_cli.profiling.records import Sample
from gpipe_cli.report.formatting import describe
from gpipe_cli.schedule import ScheduleModule
from gpipe_cli.schedule.action import Checkpoint, checked_checkpoint
from gpipe_cli.schedule.spec import PipelineSpec
from gpipe_cli.values import parse_bytes

RESERVED = (
    *("step", "epoch", "split", "loss", "loss_mean", "loss_min", "loss_max", "lr"),
    *("samples_per_second", "seconds", "grad_norm"),
)
"""Columns of metrics.jsonl that are no metrics of a loss."""


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
