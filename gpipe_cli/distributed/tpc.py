"""The names that programs of TorchDistPackage import. Its object `tpc`, the parallel context, is this module.

from gpipe_cli.distributed import forward_backward, partition_uniform, setup_distributed, tpc

setup_distributed()
tpc.setup_process_groups([("data", world_size / 2), ("pipe", 2)])
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gpipe_cli.accelerator.devices import accelerators, is_accelerator
from gpipe_cli.accelerator.streams import set_current_device
from gpipe_cli.balance.solver import solve
from gpipe_cli.distributed.function_pipeline import forward_backward, forward_eval
from gpipe_cli.distributed.gradient_buckets import summed_gradients
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
from gpipe_cli.distributed.world import sum_of_numbers
from gpipe_cli.errors import ConfigError, NumericError, PeerError
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


@torch.no_grad()
def average_gradients(parameters: Tensor | Iterable[Tensor], rows: int | None = None) -> None:
    """Replace each gradient by its mean over the group `data`; every process of the group calls it.

    Call it once per step, when `forward_backward` has returned and before gradients are clipped. Give `rows`, the rows
    of this replica's batch, where they may differ: then every row of all batches counts once. A gradient that some
    replicas do not have counts as zero there; one that none has stays None.
    """
    own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not own:  # nor does any other process of the group, because they hold the same layers
        return
    if any(hasattr(parameter, "full_tensor") for parameter in own):
        raise ConfigError(
            "average_gradients: these parameters are sharded, by fully_shard for example, "
            "which averages gradients itself; remove average_gradients"
        )
    group = get_group(DATA)
    share = 1 / distributed.get_world_size(group)
    if rows is not None:
        share = rows / float(sum_of_numbers(torch.tensor([rows]), group))
    for parameter in own:
        # Scaled before the sum, because replicas with unequal rows have unequal shares.
        if parameter.grad is not None:
            parameter.grad.mul_(share)
    for parameter, gradient in summed_gradients(own, group):
        if parameter.grad is None:
            parameter.grad = gradient.clone()
        else:
            parameter.grad.copy_(gradient)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Do what `torch.nn.utils.clip_grad_norm_` does on the whole model; call it in every process of the pipe.

    Returns the norm before clipping. A parameter that several processes share is counted by each of them.
    """
    own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    norm = get_total_norm(gradients, norm_type) if gradients else torch.zeros(())
    # For parameters that fully_shard has divided it is a DTensor; importing that class to ask for it would be slow.
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    norm = _pipe_norm(norm, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise NumericError(f"the gradient norm over all processes of the pipe is {float(norm)}")
    if gradients:
        clip_grads_with_norm_(own, max_norm, norm.to(gradients[0].device))
    return norm


def _pipe_norm(norm: Tensor, norm_type: float) -> Tensor:
    """Combine the norms of all processes: powers add up, norms do not; infinity norms take the maximum."""
    largest = math.isinf(norm_type)
    group = get_group(PIPE)
    # On the device of the group, because a process without gradients has its norm on the CPU. In double precision: the
    # square of a large float32 norm overflows.
    powers = norm.to(device_of(group), torch.float64)
    powers = powers if largest else powers**norm_type
    operation = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
    distributed.all_reduce(powers, op=operation, group=group)
    return (powers if largest else powers ** (1 / norm_type)).to(norm.dtype)
