"""What a step of training would be like with these settings: its course through the partitions, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from gpipe_cli.balance.memory import Memory
from gpipe_cli.balance.size import PARAMETERS_AND_GRADIENTS, memory_of, optimizer_scale
from gpipe_cli.byte_size import byte_count
from gpipe_cli.config.schema import Costed, Shared
from gpipe_cli.config.targets import instantiate
from gpipe_cli.engines.devices import available_cores
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.schedule.course import Course


def make_course(settings: Shared, partitions: int, devices: Sequence[torch.device]) -> Course:
    return Course(
        schedule=settings.schedule.name,
        partitions=partitions,
        micro_batches=min(settings.chunks, settings.batch_size),
        checkpoint=settings.checkpoint if isinstance(settings, Costed) else "never",
        devices=len(devices),
        cores=available_cores() if all(device.type == "cpu" for device in devices) else None,
    )


def make_memory(settings: Shared, model: nn.Sequential, sample: Sample, course: Course) -> Memory:
    """What partitions of the model would need, and the limit if there is one."""
    if not isinstance(settings, Costed):
        return memory_of(model, sample, course, PARAMETERS_AND_GRADIENTS)
    limit = None if settings.device_memory is None else byte_count(settings.device_memory)
    return memory_of(model, sample, course, optimizer_scale(optimizer_factory(settings)), limit)


def optimizer_factory(settings: Costed) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = instantiate(
            settings.optimizer, "optimizer", settings.allow, params=parameters
        )
        return made

    return optimizer
