"""Where a process stands: which partitions of which replica are its own.

Decides that partitions are dealt to the processes of a pipe round robin, as `schedule.action` deals them to workers
and torch's schedules deal stages to ranks. Knows nothing of what the processes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from gpipe_cli.distributed.flushes import torch_schedule_class
from gpipe_cli.distributed.groups import get_group
from gpipe_cli.errors import ConfigError
from gpipe_cli.schedule import names, traits
from gpipe_cli.schedule.action import partitions_of

__all__ = ["Place", "check_placement"]


@final
@dataclass(frozen=True)
class Place:
    pipe: ProcessGroup
    """The processes that hold the other partitions of this replica."""
    data: ProcessGroup
    """The processes that hold the same partitions of the other replicas."""
    device: torch.device
    partitions: int
    """Of the whole model."""
    rank: int
    """In the pipe."""
    ranks: int
    replica: int
    replicas: int

    @classmethod
    def of_groups(cls, partitions: int, devices: Sequence[torch.device]) -> Place:
        """From the groups `pipe` and `data` that `setup_process_groups` made; `devices`: one per rank of a pipe."""
        pipe, data = get_group("pipe"), get_group("data")
        rank, ranks = distributed.get_rank(pipe), distributed.get_world_size(pipe)
        if len(devices) != ranks:
            raise ConfigError(
                f"{len(devices)} devices for the {ranks} processes of a pipe; give one for each"
            )
        return cls(
            pipe,
            data,
            devices[rank],
            partitions,
            rank=rank,
            ranks=ranks,
            replica=distributed.get_rank(data),
            replicas=distributed.get_world_size(data),
        )

    @property
    def own(self) -> range:
        """The partitions of this process."""
        return partitions_of(self.rank, self.partitions, self.ranks)

    def rank_of(self, partition: int) -> int:
        return partition % self.ranks

    @property
    def last_rank(self) -> int:
        """The one that sees the output and the loss."""
        return self.rank_of(self.partitions - 1)

    @property
    def has_output(self) -> bool:
        return self.rank == self.last_rank


def check_placement(schedule: str, partitions: int, ranks: int) -> None:
    """Raise ConfigError if torch cannot run the schedule, or not so many partitions in so many processes."""
    given = f"schedule={schedule}: {partitions} partitions for {ranks} processes"
    torch_schedule_class(schedule)
    if not traits(schedule).several_per_device and partitions != ranks:
        several = "|".join(names(several_per_device=True))
        raise ConfigError(f"{given}; each runs one (only schedule={several} gives it several)")
    if partitions % ranks:
        raise ConfigError(f"{given}; each must get as many as the others, so give a multiple of {ranks}")
    if ranks == 1 and partitions > 1:
        raise ConfigError(f"{given}; between partitions next to each other torch needs two processes")
