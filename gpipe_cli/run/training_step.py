"""Describe one training step from the settings, before it runs: pipeline, sample, autocast, optimizer and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gpipe_cli.accelerator.determinism import report_nondeterministic_operator
from gpipe_cli.accelerator.devices import available_cores
from gpipe_cli.accelerator.memory import is_out_of_memory
from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.size import TrainedBytes, memory_objective
from gpipe_cli.config.instantiate import instantiate
from gpipe_cli.config.schema import CostConfig, ModelConfig, PlanConfig, RunConfig
from gpipe_cli.engines.training_loss import DTYPES
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.optimizer_state import StateBytes, state_by_parameter
from gpipe_cli.report.formatting import describe
from gpipe_cli.run.data import BatchLoader
from gpipe_cli.run.optimizer import optimizer_factory
from gpipe_cli.schedule import ScheduleModule
from gpipe_cli.schedule.checkpoint import Checkpoint, checked_checkpoint
from gpipe_cli.schedule.pipeline_spec import PipelineSpec
from gpipe_cli.values import parse_bytes


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
    if not isinstance(settings, CostConfig):
        return "never"
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
    dtype = DTYPES.get(settings.precision) if isinstance(settings, RunConfig | PlanConfig) else None
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def make_memory(
    settings: ModelConfig, model: nn.Sequential, sample: Sample, spec: PipelineSpec
) -> MemoryObjective:
    """How much memory partitions of the model need, and the limit if there is one."""
    with autocast_of(settings):
        return memory_objective(model, sample, spec, trained_bytes(settings, model), memory_limit(settings))


def memory_limit(settings: ModelConfig) -> int | None:
    """Bytes that a device may use at most."""
    limit = settings.device_memory if isinstance(settings, CostConfig) else None
    return None if limit is None else parse_bytes(limit)


def trained_bytes(settings: ModelConfig, model: nn.Sequential) -> TrainedBytes:
    """Bytes of a parameter with its gradient and, for a command with an optimizer, its optimizer state."""
    if not isinstance(settings, CostConfig):
        return with_gradient({})
    return with_gradient(state_by_parameter(optimizer_factory(settings, model), model))


def with_gradient(state: StateBytes) -> TrainedBytes:
    """Bytes of a parameter with its gradient and its optimizer state."""
    return lambda parameter: 2 * parameter.nbytes + state.get(parameter, 0)
