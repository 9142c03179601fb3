"""The vocabulary of schedules: actions, their kinds, the order of all workers' actions, and a schedule's traits."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final


@final
class Kind(enum.Enum):
    """What an action does with one micro-batch on one partition."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the input and of the weights."""
    INPUT_GRAD = "I"
    """The half of a split backward that the previous partition waits for."""
    WEIGHT_GRAD = "W"
    """The other half, which no other partition waits for."""


@final
@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    partition: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.partition}.{self.micro_batch}"


Order: TypeAlias = tuple[tuple[Action, ...], ...]
"""One tuple of actions per worker, run from left to right."""


@final
@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    """What the rest of the package must know about a schedule besides its order."""

    name: str
    splits_backward: bool = False
    """Whether the order has INPUT_GRAD and WEIGHT_GRAD actions instead of some or all BACKWARD ones."""
    several_per_device: bool = False
    """Whether a device may run more than one partition; otherwise each device runs exactly one."""
    torch_schedule: str | None = None
    """The class of `torch.distributed.pipelining` that runs this schedule across processes; None if there is none.

    It must run the backward of each partition in ascending micro-batch order, or results change with the engine.
    """
    engine_only: bool = False
    """Whether an engine uses the schedule internally, so that users cannot choose it."""
    ticks_per_micro_batch: int | None = None
    """For orders that follow a clock, the ticks between two forwards of a device: 1 if all forwards come first, 2 if
    forwards and backwards alternate. None for other orders; the planner then simulates them action by action."""
    workers: tuple[int, ...] | None = None
    """For a single order, the worker of each partition; None: partitions are dealt to the workers round robin."""
    live_micro_batches: Callable[[int, int, int, int], int] | None = None
    """The micro-batches a partition keeps alive, from (partition, partitions, chunks, devices), without listing the
    order. None if there is no closed form."""

    def placement(self, partitions: int, devices: int) -> tuple[int, ...]:
        """The worker of each partition."""
        return self.workers or tuple(partition % devices for partition in range(partitions))


def partitions_of(worker: int, partitions: int, devices: int) -> range:
    """The partitions a worker runs, ascending: partition `p` is on worker `p % devices`."""
    return range(worker, partitions, devices)


def staggered(partition: int, chunks: int, delays: Mapping[Kind, int]) -> tuple[Action, ...]:
    """A partition's actions in rounds: in round `r`, each kind runs micro-batch `r - delay`, if that exists."""
    # Kinds within a round run in the order of `delays`: with a delay of 0 a backward follows its own forward.
    return tuple(
        Action(kind, partition, now - delay)
        for now in range(chunks + max(delays.values()))
        for kind, delay in delays.items()
        if 0 <= now - delay < chunks
    )
