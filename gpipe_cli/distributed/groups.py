"""The processes as a mesh of named axes, and the group of this process along each of them.

    setup_process_groups([("data", 2), ("pipe", 4)])   # 8 processes: 2 replicas of 4 partitions

The last axis runs fastest: above, ranks 0 to 3 are the first replica. Decides who is in a group with whom; knows
nothing of what is sent in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import final

from torch import distributed
from torch.distributed import ProcessGroup

from gpipe_cli.errors import ConfigError

__all__ = [
    "Axis",
    "get_group",
    "get_ranks_in_group",
    "is_first_in_pipeline_group",
    "is_last_in_pipeline_group",
    "lines",
    "setup_process_groups",
]

Axis = tuple[str, int]
"""Its name and how many processes lie along it."""
PIPE, DATA = "pipe", "data"


@final
@dataclass(frozen=True)
class Member:
    """This process in its group along one axis."""

    group: ProcessGroup
    ranks: list[int]


@final
@dataclass(frozen=True)
class Mesh:
    world: ProcessGroup
    """The default group it was made in: once that is destroyed, so is the mesh."""
    members: dict[str, Member]


_meshes: list[Mesh] = []
"""The one that counts, if any: torch's own groups are one set per process too."""


def setup_process_groups(axes: Sequence[Axis], *, timeout: timedelta | None = None) -> None:
    """Make the groups of every axis. Every process calls it, with the same axes."""
    world = _world("setup_process_groups")
    _check(axes, distributed.get_world_size())
    rank = distributed.get_rank()
    members = {}
    for name, _ in axes:
        for ranks in lines(axes, name):
            # Every process takes part in making every group, also those it is not in: torch asks for that.
            group = distributed.new_group(ranks, timeout=timeout)
            if rank in ranks:
                members[name] = Member(group, ranks)
    _meshes[:] = [Mesh(world, members)]


def get_group(name: str) -> ProcessGroup:
    """The group of this process along an axis."""
    return _member(name).group


def get_ranks_in_group(name: str) -> list[int]:
    """The global ranks of that group, in its order."""
    return list(_member(name).ranks)


def is_first_in_pipeline_group() -> bool:
    return _member(PIPE).ranks[0] == distributed.get_rank()


def is_last_in_pipeline_group() -> bool:
    return _member(PIPE).ranks[-1] == distributed.get_rank()


def lines(axes: Sequence[Axis], name: str) -> Iterator[list[int]]:
    """The ranks along an axis, one list for each place on the other axes."""
    sizes = [size for _, size in axes]
    position = [axis for axis, _ in axes].index(name)
    strides = [math.prod(sizes[index + 1 :]) for index in range(len(sizes))]
    others = [range(size) if index != position else range(1) for index, size in enumerate(sizes)]
    for place in product(*others):
        first = sum(step * stride for step, stride in zip(place, strides, strict=True))
        yield [first + step * strides[position] for step in range(sizes[position])]


def _check(axes: Sequence[Axis], world_size: int) -> None:
    names = [name for name, _ in axes]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"process groups {axes}: give each axis once, such as [('data', 2), ('pipe', 4)]")
    if any(size < 1 for _, size in axes):
        raise ConfigError(f"process groups {axes}: every axis has at least one process")
    if math.prod(size for _, size in axes) != world_size:
        asked = " x ".join(f"{name} {size}" for name, size in axes)
        wanted = math.prod(size for _, size in axes)
        raise ConfigError(
            f"process groups {asked} are {wanted} processes, there are {world_size}; "
            "start as many as the sizes multiply to"
        )


def _member(name: str) -> Member:
    world = _world(f"the group '{name}'")
    if not _meshes or _meshes[0].world is not world:
        raise ConfigError(f"no group '{name}': call setup_process_groups first, in every process")
    members = _meshes[0].members
    if name not in members:
        raise ConfigError(f"no group '{name}'; setup_process_groups made {', '.join(members)}")
    return members[name]


def _world(who: str) -> ProcessGroup:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(f"{who} needs torch.distributed; call torch.distributed.init_process_group first")
    world = distributed.group.WORLD
    assert world is not None, "it is initialised"
    return world
