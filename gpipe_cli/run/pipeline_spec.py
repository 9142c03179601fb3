"""What a step of training would be like with these settings: its spec through the partitions, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gpipe_cli.balance.memory import Memory
from gpipe_cli.balance.size import TrainedBytes, memory_of
from gpipe_cli.byte_size import byte_count
from gpipe_cli.config.schema import CostConfig, ModelConfig, RunConfig
from gpipe_cli.config.targets import instantiate
from gpipe_cli.engines.devices import available_cores
from gpipe_cli.engines.stepping import DTYPES
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.optimizer_state import state_bytes
from gpipe_cli.report.failure import describe
from gpipe_cli.schedule.checkpoint import Checkpoint, settled
from gpipe_cli.schedule.pipeline_spec import PipelineSpec


def make_course(settings: ModelConfig, partitions: int, devices: Sequence[torch.device]) -> PipelineSpec:
    return PipelineSpec(
        schedule=settings.schedule.name,
        partitions=partitions,
        micro_batches=min(settings.chunks, settings.batch_size),
        checkpoint=checkpoint_of(settings, partitions),
        devices=len(devices),
        cores=available_cores() if all(device.type == "cpu" for device in devices) else None,
    )


def checkpoint_of(settings: ModelConfig, partitions: int) -> Checkpoint:
    """One mode, or one for each partition; what does not train recomputes nothing."""
    if not isinstance(settings, CostConfig):
        return "never"
    try:
        return settled(settings.checkpoint, partitions)
    except ValueError as error:
        raise ConfigError(f"checkpoint={settings.checkpoint}: {error}") from error


def make_memory(settings: ModelConfig, model: nn.Sequential, sample: Sample, spec: PipelineSpec) -> Memory:
    """What partitions of the model would need, and the limit if there is one."""
    with precision_of(settings):
        return memory_of(model, sample, spec, trained_bytes(settings, model), memory_limit(settings))


def memory_limit(settings: ModelConfig) -> int | None:
    """Bytes that a device may need at most."""
    given = settings.device_memory if isinstance(settings, CostConfig) else None
    return None if given is None else byte_count(given)


def trained_bytes(settings: ModelConfig, model: nn.Module) -> TrainedBytes:
    """What a parameter needs: itself, its gradient, the optimizer's state where there is one."""
    state = dict[nn.Parameter, int]()
    if isinstance(settings, CostConfig):
        parameters = list(model.parameters())
        state = dict(zip(parameters, state_bytes(optimizer_factory(settings), parameters), strict=True))

    def trained(parameter: nn.Parameter) -> int:
        return 2 * parameter.nbytes + state.get(parameter, 0)

    return trained


def precision_of(settings: ModelConfig, kind: str = "cpu") -> AbstractContextManager[Any]:
    """The autocast of a run, for what is said of it before it begins.

    Tensors without values say they are on the CPU, whatever kind of device the run will use.
    """
    dtype = DTYPES.get(settings.precision) if isinstance(settings, RunConfig) else None
    return nullcontext() if dtype is None else torch.autocast(kind, dtype=dtype)


@contextmanager
def sample_must_fit(sample: Sample) -> Iterator[None]:
    """What torch raises over a sample of the wrong shape is a matter of the settings, not of a layer's code."""
    try:
        yield
    except RuntimeError as error:
        shapes = " ".join("x".join(map(str, one.shape)) for one in tensors_of(sample.input))
        raise ConfigError(
            f"the model does not take a micro-batch of {shapes}: {describe(error)}; choose data and model that fit"
        ) from error


def optimizer_factory(settings: CostConfig) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = instantiate(
            settings.optimizer, "optimizer", settings.allow, params=parameters
        )
        return made

    return optimizer
