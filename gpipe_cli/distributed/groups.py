"""The processes as a mesh of named axes, with a process group along each of them.

    setup_process_groups([("data", 2), ("pipe", 4)])   # 8 processes: 2 replicas of 4 partitions

The last axis varies fastest: above, ranks 0 to 3 are the first replica. `torch.distributed.init_device_mesh` would make
the same groups, but gives them torch's default timeout unless you pass options that only private classes of torch have.

An accelerator has a backend of its own (NCCL, XCCL, ...), which torch or an extension of torch registers. Tensors on
the CPU always go through gloo.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from gpipe_cli.accelerator.devices import current_device, is_accelerator
from gpipe_cli.errors import ConfigError

Axis = tuple[str, float]
"""Its name, and the number of processes along it: a whole number, which `world_size / 2` may be too."""
PIPE, DATA, MODEL, GLOBAL = "pipe", "data", "model", "global"
GLOO = "gloo"


_groups: dict[str, ProcessGroup] = {}
"""The groups of this process that `setup_process_groups` made last, by name, and under `global` torch's default group
at that time: once that is destroyed, the others are invalid."""


def setup_process_groups(axes: Sequence[Axis], *, timeout: timedelta | None = None) -> None:
    """Create the groups of every axis; call it in every process, with the same axes.

    There are two more groups: `model` has the processes of a replica, which are those along all axes but `data`, and
    `global` has all processes.
    """
    world = _default_group("setup_process_groups")
    sizes = _checked(axes, distributed.get_world_size())
    rank = distributed.get_rank()
    lines = {name: ranks_along(sizes, name) for name in sizes}
    in_replica = [name for name in sizes if name != DATA]
    if len(in_replica) > 1:
        lines.setdefault(MODEL, ranks_along(sizes, *in_replica))
    # Numbers and text are sent from the CPU, whichever backend the caller chose for tensors. None: the same backends.
    backends = with_cpu_backend(distributed.get_backend_config())
    made = {}
    for name, groups in lines.items():
        for ranks in groups:
            # torch requires every process to take part in the creation of every group.
            group = distributed.new_group(ranks, timeout=timeout, backend=backends)
            if rank in ranks:
                made[name] = group
    for group in made.values():
        # Creates what a backend creates with its first operation. NCCL requires all processes of a group to take part
        # in that, and a send has only two.
        distributed.all_reduce(torch.zeros(1, device=device_of(group)), group=group)
    if len(in_replica) == 1:
        made.setdefault(MODEL, made[in_replica[0]])
    _groups.clear()
    _groups.update({**made, GLOBAL: world})


def group_names() -> list[str]:
    """The names of the groups that `setup_process_groups` made; none before."""
    is_current = _groups.get(GLOBAL) is distributed.group.WORLD
    return [name for name in _groups if name != GLOBAL] if is_current else []


def get_group(name: str) -> ProcessGroup:
    """The group of this process along an axis, or its group `model` or `global`."""
    world = _default_group(f"the group '{name}'")
    if name == GLOBAL:
        return world
    if _groups.get(GLOBAL) is not world:
        raise ConfigError(f"no group '{name}': call setup_process_groups first, in every process")
    if name not in _groups:
        raise ConfigError(f"no group '{name}'; setup_process_groups made {', '.join(group_names())}")
    return _groups[name]


def get_ranks_in_group(name: str) -> list[int]:
    """The global ranks of the group of this process, in ascending order."""
    return distributed.get_process_group_ranks(get_group(name))


def get_group_rank(name: str) -> int:
    """The position of this process in its group."""
    return distributed.get_rank(get_group(name))


def get_group_size(name: str) -> int:
    """The number of processes in the group of this process."""
    return distributed.get_world_size(get_group(name))


def is_first_in_pipeline_group() -> bool:
    """Whether this process runs the first partition."""
    return get_group_rank(PIPE) == 0


def is_last_in_pipeline_group() -> bool:
    """Whether this process runs the last partition."""
    return get_group_rank(PIPE) == get_group_size(PIPE) - 1


def ranks_along(sizes: Mapping[str, int], *names: str) -> list[list[int]]:
    """The groups of ranks along some axes: one list for each position on the other axes."""
    mesh = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    along = mesh.movedim([list(sizes).index(name) for name in names], list(range(-len(names), 0)))
    groups: list[list[int]] = along.reshape(-1, math.prod(sizes[name] for name in names)).tolist()
    return groups


def _checked(axes: Sequence[Axis], world_size: int) -> dict[str, int]:
    """The number of processes along each axis."""
    if not axes or len({name for name, _ in axes}) < len(axes):
        raise ConfigError(f"process groups {axes}: name each axis once, such as [('data', 2), ('pipe', 4)]")
    for name, size in axes:
        if not float(size).is_integer():
            raise ConfigError(
                f"process groups {axes}: {size!r} processes along '{name}'; give a whole number. There are "
                f"{world_size} processes in all"
            )
    sizes = {name: int(size) for name, size in axes}
    if min(sizes.values()) < 1:
        raise ConfigError(f"process groups {axes}: every axis needs at least one process")
    if math.prod(sizes.values()) != world_size:
        raise ConfigError(
            f"process groups {' x '.join(f'{name} {size}' for name, size in sizes.items())} are "
            f"{math.prod(sizes.values())} processes, there are {world_size}; start as many as the sizes multiply to"
        )
    return sizes


def _default_group(caller: str) -> ProcessGroup:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(
            f"{caller} needs torch.distributed; call torch.distributed.init_process_group first"
        )
    world = distributed.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    return world


def backends_for(device: torch.device) -> str:
    """What `init_process_group` needs to know if the tensors of this process are on the device.

    A device without a backend is refused. gloo would need a copy of every tensor on the CPU, and torch's schedules,
    which send the tensors, make none.
    """
    if not is_accelerator(device):
        return GLOO
    hint = "use engine=threads, or devices=[cpu,...]"
    try:
        name = distributed.get_default_backend_for_device(device)
    except ValueError as error:
        raise ConfigError(
            f"devices: torch.distributed has no backend for the type '{device.type}'; {hint}"
        ) from error
    if not distributed.is_backend_available(name):
        raise ConfigError(
            f"devices: '{device}' needs the backend {name}, which this build of torch does not have; {hint}"
        )
    return f"cpu:{GLOO},{device.type}:{name}"


def with_cpu_backend(config: str) -> str | None:
    """The backends of a group, such as `cuda:nccl`, and one for the CPU; None if the group has one."""
    return None if "cpu" in _backends(config) else f"cpu:{GLOO},{config}"


def device_of(group: ProcessGroup) -> torch.device:
    """Where the tensors of a group are: the current accelerator if the group has a backend for it, else the CPU."""
    device = current_device()
    backend = _backends(distributed.get_backend_config(group)).get(device.type, GLOO)
    # gloo is listed for some accelerators too, but supports few of the operations there.
    return device if backend != GLOO else torch.device("cpu")


def _backends(config: str) -> dict[str, str]:
    """By device type, from a text such as `cpu:gloo,cuda:nccl`."""
    pairs = (pair.partition(":") for pair in config.split(","))
    return {device_type: name for device_type, _, name in pairs}


@final
@dataclass(frozen=True)
class RankCoords:
    """Where a rank stands in the mesh: its replica, its position in the pipe, and its partitions.

    Partitions are dealt to the ranks of a pipe round robin, as `schedule.action` deals them to workers and torch's
    schedules deal stages to ranks, unless a custom schedule places them otherwise.
    """

    pipe: ProcessGroup | None
    """The group of the ranks with the other partitions of this replica; None for a process alone."""
    data: ProcessGroup | None
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
        rank, ranks = get_group_rank(PIPE), get_group_size(PIPE)
        if len(devices) != ranks:
            raise ConfigError(
                f"{len(devices)} devices for the {ranks} processes of a pipe; give one for each"
            )
        return cls(
            get_group(PIPE),
            get_group(DATA),
            devices[rank],
            workers,
            rank=rank,
            ranks=ranks,
            replica=get_group_rank(DATA),
            replicas=get_group_size(DATA),
        )

    @property
    def partitions(self) -> int:
        """How many partitions the whole model has."""
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
