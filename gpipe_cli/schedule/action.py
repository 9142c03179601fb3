"""The vocabulary of schedules: actions and their orders, checkpoint modes, and what a schedule declares."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final


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


class ScheduleModule(Protocol):
    """A schedule: a module of that form, an entry of the table in `orders.py`, or a `FixedOrder`."""

    @property
    def TRAITS(self) -> ScheduleTraits: ...

    def order(self, partitions: int, chunks: int, devices: int, /) -> Order: ...

    def __hash__(self) -> int: ...


MODES = ("always", "except_last", "never")

Checkpoint: TypeAlias = str | tuple[str, ...]
"""A mode for all partitions, or a tuple with one for each."""


def checked_checkpoint(given: str | Iterable[str], partitions: int) -> Checkpoint:
    """Check what the user gave; modes that are all the same become a single one."""
    is_single = isinstance(given, str) or not isinstance(given, Iterable)
    modes = (str(given),) if is_single else tuple(map(str, given))
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never' ({mode!r})")
    if not is_single and len(modes) != partitions:
        raise ValueError(
            f"checkpoint has {len(modes)} modes for {partitions} partitions; give one for each, or one for all"
        )
    return modes[0] if len(set(modes)) == 1 else modes


def checkpointed_counts(checkpoint: Checkpoint, partitions: int, micro_batches: int) -> tuple[int, ...]:
    """For each partition the first micro-batch that is not checkpointed; `except_last` is the last that exists."""
    stops = {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}
    modes = (checkpoint,) * partitions if isinstance(checkpoint, str) else checkpoint
    return tuple(stops[mode] for mode in modes)
