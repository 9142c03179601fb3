"""Where a rank stands in the mesh of processes: its replica, its position in the pipe, and its partitions.

Partitions are dealt to the ranks of a pipe round robin, as `schedule.action` deals them to workers and torch's
schedules deal stages to ranks, unless an order of your own places them otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from gpipe_cli.distributed.groups import get_group
from gpipe_cli.errors import ConfigError


@final
@dataclass(frozen=True)
class RankCoords:
    pipe: ProcessGroup
    """The group of the ranks with the other partitions of this replica."""
    data: ProcessGroup
    """The group of the ranks with the same partitions of the other replicas."""
    device: torch.device
    workers: tuple[int, ...]
    """The rank, in the pipe, of each partition of the whole model."""
    rank: int
    """In the pipe."""
    ranks: int
    replica: int
    replicas: int

    @classmethod
    def of_groups(cls, workers: tuple[int, ...], devices: Sequence[torch.device]) -> RankCoords:
        """From the groups that `setup_process_groups` created; `devices`: one per rank of a pipe."""
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
            workers,
            rank=rank,
            ranks=ranks,
            replica=distributed.get_rank(data),
            replicas=distributed.get_world_size(data),
        )

    @property
    def partitions(self) -> int:
        """Of the whole model."""
        return len(self.workers)

    @property
    def own_partitions(self) -> list[int]:
        return [partition for partition, rank in enumerate(self.workers) if rank == self.rank]

    def rank_of(self, partition: int) -> int:
        return self.workers[partition]

    @property
    def last_rank(self) -> int:
        """The rank that has the output and the loss."""
        return self.rank_of(self.partitions - 1)

    @property
    def has_output(self) -> bool:
        return self.rank == self.last_rank
