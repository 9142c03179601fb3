"""The names that programs of TorchDistPackage import. Its object `tpc`, the parallel context, is this module.

from gpipe_cli.distributed import forward_backward, partition_uniform, setup_distributed, tpc

setup_distributed()
tpc.setup_process_groups([("data", world_size / 2), ("pipe", 2)])
"""

from __future__ import annotations

import os
import subprocess
from functools import partial
from typing import TypeVar

import torch
from torch import distributed, nn

from gpipe_cli.accelerator.devices import accelerators, is_accelerator
from gpipe_cli.accelerator.streams import set_current_device
from gpipe_cli.balance.solver import solve
from gpipe_cli.distributed.gradients import average_gradients, clip_grad_norm_
from gpipe_cli.distributed.groups import (
    DATA,
    GLOBAL,
    GLOO,
    MODEL,
    PIPE,
    backends_for,
    device_of,
    get_group,
    get_group_rank,
    get_group_size,
    get_ranks_in_group,
    group_names,
    is_first_in_pipeline_group,
    is_last_in_pipeline_group,
    setup_process_groups,
)
from gpipe_cli.distributed.pipeline_step import forward_backward, forward_eval
from gpipe_cli.errors import PeerError
from gpipe_cli.sequential import flatten_model

__all__ = [
    "average_gradients",
    "clip_grad_norm_",
    "flatten_model",
    "forward_backward",
    "forward_eval",
    "get_group",
    "get_group_rank",
    "get_group_size",
    "get_ranks_in_group",
    "is_first_in_pipeline_group",
    "is_last_in_pipeline_group",
    "is_using_pp",
    "partition_balanced",
    "partition_uniform",
    "setup_distributed",
    "setup_process_groups",
    "test_comm",
]

Layers = TypeVar("Layers", list[nn.Module], nn.Sequential)


def setup_distributed(backend: str | None = None, port: int | None = None) -> tuple[int, int, int, str]:
    """Connect this process to the others that torchrun or srun has started; returns rank, size, port and address.

    backend: by default that of this machine's accelerators, or gloo; an accelerator becomes the current device.
    port: where processes that srun has started meet; torchrun sets its own.
    """
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        _take_from_slurm(port)
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0)))
    present = accelerators()
    device = present[local_rank % len(present)] if present else torch.device("cpu")
    set_current_device(device)
    bound = device if is_accelerator(device) and backend != GLOO else None
    distributed.init_process_group(backend or backends_for(device), device_id=bound)
    address, chosen_port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return distributed.get_rank(), distributed.get_world_size(), chosen_port, address


def _take_from_slurm(port: int | None) -> None:
    """Set what torchrun sets, in a process that srun has started."""
    environment = os.environ
    for name, given in {"RANK": "PROCID", "WORLD_SIZE": "NTASKS", "LOCAL_RANK": "LOCALID"}.items():
        environment[name] = environment[f"SLURM_{given}"]
    # Jobs that share a node must not meet at one port.
    chosen = environment.get("MASTER_PORT", 20000 + int(environment["SLURM_JOB_ID"]) % 10000)
    environment["MASTER_PORT"] = str(chosen if port is None else port)
    if "MASTER_ADDR" not in environment:
        command = ["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]]
        hosts = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        environment["MASTER_ADDR"] = hosts.split()[0]


def is_first_in_group(name: str) -> bool:
    return get_group_rank(name) == 0


def is_last_in_group(name: str) -> bool:
    return get_group_rank(name) == get_group_size(name) - 1


def get_prev_global_rank(name: str = PIPE) -> int:
    """The rank before this one in its group; before the first comes the last."""
    return get_ranks_in_group(name)[get_group_rank(name) - 1]


def get_next_global_rank(name: str = PIPE) -> int:
    return get_ranks_in_group(name)[(get_group_rank(name) + 1) % get_group_size(name)]


def is_mode_inited(name: str) -> bool:
    """Whether there is such a group, of more than one process."""
    return name in group_names() and get_group_size(name) > 1


def is_using_pp() -> bool:
    """Whether `setup_process_groups` made pipes of more than one process."""
    return is_mode_inited(PIPE)


get_tp_rank, get_tp_size = partial(get_group_rank, "tensor"), partial(get_group_size, "tensor")
get_pp_rank, get_pp_size = partial(get_group_rank, PIPE), partial(get_group_size, PIPE)
get_dp_rank, get_dp_size = partial(get_group_rank, DATA), partial(get_group_size, DATA)
get_mp_rank, get_mp_size = partial(get_group_rank, MODEL), partial(get_group_size, MODEL)
is_first_in_tensor_group = partial(is_first_in_group, "tensor")
is_last_in_tensor_group = partial(is_last_in_group, "tensor")
is_first_in_data_group = partial(is_first_in_group, DATA)
is_last_in_data_group = partial(is_last_in_group, DATA)
is_first_in_model_group = partial(is_first_in_group, MODEL)
is_last_in_model_group = partial(is_last_in_group, MODEL)


def test_comm() -> None:
    """Raise PeerError unless a sum reaches every process of each group; all processes call it together."""
    for group in map(get_group, [*group_names(), GLOBAL]):
        reached = torch.ones(1, device=device_of(group))
        distributed.all_reduce(reached, group=group)
        if int(reached) != (size := distributed.get_world_size(group)):
            raise PeerError(f"{int(reached)} of the {size} processes of a group took part")


def partition_uniform(flat_sequence: Layers, extra_len: int = 0) -> Layers:
    """The layers of this process, equally many in each process of the pipe; the last one has the remaining ones too.

    11 layers over 4 processes are 2, 2, 2, 5. `extra_len` counts layers that are not in the list, such as a loss after
    the last: with 3, they are 3, 3, 3, 2.
    """
    rank, size = get_group_rank(PIPE), get_group_size(PIPE)
    share = (len(flat_sequence) + extra_len) // size
    own: Layers = flat_sequence[rank * share : None if rank == size - 1 else (rank + 1) * share]  # type: ignore[assignment]
    return own


def partition_balanced(flat_sequence: Layers, sequence: object = None) -> Layers:
    """The layers of this process, so that the process of the pipe with the most parameters has as few as possible.

    sequence: not used; TorchDistPackage's programs give it.
    """
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) or 1 for layer in flat_sequence]
    balance = solve(sizes, get_group_size(PIPE)).balance
    begin = sum(balance[: get_group_rank(PIPE)])
    own: Layers = flat_sequence[begin : begin + balance[get_group_rank(PIPE)]]  # type: ignore[assignment]
    return own
