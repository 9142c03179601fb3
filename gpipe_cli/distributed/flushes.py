"""How the micro-batches of a mini-batch are handed to torch's schedules: in flushes.

A torch schedule takes micro-batches of one size only, and not every number of them:

- those of one stage per process need at least as many as there are processes; with fewer there is nothing to alternate,
  so all of them do what ScheduleGPipe does.
- those of several stages per process run m micro-batches in max(1, m // ranks) rounds of one size.

So a mini-batch becomes runs of equal sizes, and a run that does not divide evenly gives its rest a flush of its own.
Each flush drains the pipeline; gradients are still summed in the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, final

from torch.distributed import pipelining
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from gpipe_cli.errors import ConfigError
from gpipe_cli.schedule import traits

__all__ = ["Flush", "TorchScheduleClass", "flushes", "torch_schedule_class"]

TorchScheduleClass: TypeAlias = type[PipelineScheduleSingle] | type[PipelineScheduleMulti]


@final
@dataclass(frozen=True, slots=True)
class Flush:
    schedule: TorchScheduleClass
    first: int
    """The micro-batch it begins with."""
    count: int


def torch_schedule_class(schedule: str) -> TorchScheduleClass:
    """The class that runs our schedule across processes, as the schedule's traits name it."""
    name = traits(schedule).torch_schedule
    if name is None:
        raise ConfigError(
            f"schedule={schedule}: torch.distributed.pipelining has no such schedule; use engine=threads"
        )
    torch_class = getattr(pipelining, name, None)
    if not isinstance(torch_class, type) or not issubclass(
        torch_class, PipelineScheduleSingle | PipelineScheduleMulti
    ):
        raise ConfigError(
            f"schedule={schedule}: its torch_schedule={name} is not a schedule of torch.distributed.pipelining"
        )
    return torch_class


def flushes(sizes: Sequence[int], schedule: TorchScheduleClass, ranks: int) -> Iterator[Flush]:
    """Those of a mini-batch whose micro-batches have these sizes."""
    first = 0
    for _, run in groupby(sizes):
        left = len(list(run))
        while left:
            if issubclass(schedule, PipelineScheduleMulti):
                count = left - left % max(1, left // ranks)
                yield Flush(schedule, first, count)
            else:
                count = left
                yield Flush(schedule if count >= ranks else ScheduleGPipe, first, count)
            first, left = first + count, left - count
