"""The processes as a mesh of named axes, with a process group along each of them.

    setup_process_groups([("data", 2), ("pipe", 4)])   # 8 processes: 2 replicas of 4 partitions

The last axis varies fastest: above, ranks 0 to 3 are the first replica. `torch.distributed.init_device_mesh` would make
the same groups, but gives them torch's default timeout unless you pass options that only private classes of torch have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, final

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup

from gpipe_cli.distributed.backends import device_of, with_cpu_backend
from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential import by_list

Axis = tuple[str, int]
"""Its name, and the number of processes along it."""
PIPE, DATA = "pipe", "data"


@final
@dataclass(frozen=True)
class AxisGroup:
    """The group of this process along one axis."""

    group: ProcessGroup
    ranks: list[int]


@final
@dataclass(frozen=True)
class ProcessMesh:
    world: ProcessGroup
    """The default group at the time: once that is destroyed, the mesh is invalid."""
    members: dict[str, AxisGroup]


_meshes: list[ProcessMesh] = []
"""The current mesh, if any: like torch's own groups, there is one per process."""


def setup_process_groups(axes: Sequence[Axis], *, timeout: timedelta | None = None) -> None:
    """Create the groups of every axis; call it in every process, with the same axes."""
    world = _default_group("setup_process_groups")
    _check(axes, distributed.get_world_size())
    rank = distributed.get_rank()
    # Numbers and text are sent from the CPU, whichever backend the caller chose for tensors. None: the same backends.
    backends = with_cpu_backend(distributed.get_backend_config())
    members = {}
    for name, _ in axes:
        for ranks in ranks_along(axes, name):
            # torch requires every process to take part in the creation of every group.
            group = distributed.new_group(ranks, timeout=timeout, backend=backends)
            if rank in ranks:
                members[name] = AxisGroup(group, ranks)
    for member in members.values():
        # Creates what a backend creates with its first operation. NCCL requires all processes of a group to take part
        # in that, and a send has only two.
        distributed.all_reduce(torch.zeros(1, device=device_of(member.group)), group=member.group)
    _meshes[:] = [ProcessMesh(world, members)]


def get_group(name: str) -> ProcessGroup:
    """The group of this process along an axis."""
    return _axis_group(name).group


def get_ranks_in_group(name: str) -> list[int]:
    """The global ranks of the group of this process along an axis, in order."""
    return list(_axis_group(name).ranks)


def is_first_in_pipeline_group() -> bool:
    """Whether this process runs the first partition."""
    return _axis_group(PIPE).ranks[0] == distributed.get_rank()


def is_last_in_pipeline_group() -> bool:
    """Whether this process runs the last partition."""
    return _axis_group(PIPE).ranks[-1] == distributed.get_rank()


def ranks_along(axes: Sequence[Axis], name: str) -> list[list[int]]:
    """The groups of ranks along an axis: one list for each position on the other axes."""
    names, sizes = [axis for axis, _ in axes], [size for _, size in axes]
    mesh = torch.arange(math.prod(sizes)).view(sizes)
    along = mesh.movedim(names.index(name), -1).reshape(-1, mesh.shape[names.index(name)])
    groups: list[list[int]] = along.tolist()
    return groups


def _check(axes: Sequence[Axis], world_size: int) -> None:
    names = [name for name, _ in axes]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"process groups {axes}: name each axis once, such as [('data', 2), ('pipe', 4)]")
    if any(size < 1 for _, size in axes):
        raise ConfigError(f"process groups {axes}: every axis needs at least one process")
    if math.prod(size for _, size in axes) != world_size:
        sizes = " x ".join(f"{name} {size}" for name, size in axes)
        wanted = math.prod(size for _, size in axes)
        raise ConfigError(
            f"process groups {sizes} are {wanted} processes, there are {world_size}; "
            "start as many as the sizes multiply to"
        )


def _axis_group(name: str) -> AxisGroup:
    world = _default_group(f"the group '{name}'")
    if not _meshes or _meshes[0].world is not world:
        raise ConfigError(f"no group '{name}': call setup_process_groups first, in every process")
    members = _meshes[0].members
    if name not in members:
        raise ConfigError(f"no group '{name}'; setup_process_groups made {', '.join(members)}")
    return members[name]


def _default_group(caller: str) -> ProcessGroup:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(
            f"{caller} needs torch.distributed; call torch.distributed.init_process_group first"
        )
    world = distributed.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    return world


Layers = TypeVar("Layers", list[nn.Module], nn.Sequential)


def partition_uniform(layers: Layers) -> Layers:
    """The layers of this process, divided evenly over the group `pipe`: 11 layers over 4 processes are 3, 3, 3, 2."""
    group = get_group(PIPE)
    return by_list.partition_uniform(layers, distributed.get_world_size(group), distributed.get_rank(group))
