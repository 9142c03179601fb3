"""The names that programs of TorchDistPackage import. Its object `tpc`, the parallel context, is this module.

from gpipe_cli.distributed import forward_backward, partition_uniform, setup_distributed, tpc

setup_distributed()
tpc.setup_process_groups([("data", world_size / 2), ("pipe", 2)])
"""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from collections.abc import MutableMapping
from functools import partial
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

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
from gpipe_cli.errors import ConfigError, PeerError
from gpipe_cli.sequential import flatten_model

__all__ = [
    "NaiveDDP",
    "average_gradients",
    "clip_grad_norm_",
    "fix_rand",
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
FIRST_SEED = 2222
"""TorchDistPackage's."""


def setup_distributed(backend: str | None = None, port: int | None = None) -> tuple[int, int, int, str]:
    """Connect this process to the others that torchrun or srun has started; returns rank, size, port and address.

    backend: by default that of this machine's accelerators, or gloo; an accelerator becomes the current device.
    port: where processes that srun has started meet; torchrun sets its own.
    """
    environment = os.environ
    if "RANK" not in environment and "SLURM_PROCID" in environment:
        _take_from_slurm(environment, port)
    local_rank = int(environment.get("LOCAL_RANK", environment.get("RANK", 0)))
    present = accelerators()
    device = present[local_rank % len(present)] if present else torch.device("cpu")
    set_current_device(device)
    bound = device if is_accelerator(device) and backend != GLOO else None
    distributed.init_process_group(backend or backends_for(device), device_id=bound)
    address, chosen_port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return distributed.get_rank(), distributed.get_world_size(), chosen_port, address


def _take_from_slurm(environment: MutableMapping[str, str], port: int | None) -> None:
    """Set what torchrun sets, in a process that srun has started."""
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


TENSOR = "tensor"
get_tp_rank, get_tp_size = partial(get_group_rank, TENSOR), partial(get_group_size, TENSOR)
get_pp_rank, get_pp_size = partial(get_group_rank, PIPE), partial(get_group_size, PIPE)
get_dp_rank, get_dp_size = partial(get_group_rank, DATA), partial(get_group_size, DATA)
get_mp_rank, get_mp_size = partial(get_group_rank, MODEL), partial(get_group_size, MODEL)
is_first_in_tensor_group, is_last_in_tensor_group = (
    partial(is_first_in_group, TENSOR),
    partial(is_last_in_group, TENSOR),
)
is_first_in_data_group, is_last_in_data_group = (
    partial(is_first_in_group, DATA),
    partial(is_last_in_group, DATA),
)
is_first_in_model_group, is_last_in_model_group = (
    partial(is_first_in_group, MODEL),
    partial(is_last_in_group, MODEL),
)


def test_comm() -> None:
    """Raise PeerError unless a sum reaches every process of each group; all processes call it together."""
    for group in map(get_group, [*group_names(), GLOBAL]):
        reached = torch.ones(1, device=device_of(group))
        distributed.all_reduce(reached, group=group)
        if int(reached) != distributed.get_world_size(group):
            raise PeerError(
                f"{int(reached)} of {distributed.get_world_size(group)} processes of a group took part"
            )


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


def fix_rand(rank: int = 0) -> None:
    """Seed Python, NumPy and torch, each process by its rank, and let cuDNN choose deterministic kernels."""
    random.seed(FIRST_SEED + rank)
    np.random.seed(FIRST_SEED + rank)
    torch.manual_seed(FIRST_SEED + rank)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


@final
class NaiveDDP(nn.Module):
    """A module of which every process of a group has a replica, for any training loop, `forward_backward` included.

    The replicas start with the state of one process. Each `num_grad_acc_iter`-th backward averages the gradients, or
    `reduce_gradients` does if `sync` is true.
    """

    def __init__(
        self,
        module: nn.Module,
        sync: bool = False,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = False,
        process_group: ProcessGroup | None = None,
        dp_rank0: int = 0,
        reduce_op: str = "avg",
        num_grad_acc_iter: int = 1,
    ) -> None:
        """bucket_cap_mb, gradient_as_bucket_view: change nothing, since every gradient is sent on its own.
        process_group: by default all processes.
        dp_rank0: the global rank whose state the replicas start with.
        reduce_op: "avg" or "sum".
        """
        super().__init__()
        if reduce_op.lower() not in ("avg", "sum"):
            raise ConfigError(f"reduce_op={reduce_op!r}: choose 'avg' or 'sum'")
        self.module, self.group, self.sync = module, process_group, sync
        self._divisor = 1 if reduce_op.lower() == "sum" else distributed.get_world_size(process_group)
        self._iterations, self._backwards = num_grad_acc_iter, Counter[Tensor]()
        for tensor in module.state_dict().values():
            distributed.broadcast(tensor, dp_rank0, group=process_group)
        for parameter in module.parameters():
            if parameter.requires_grad and not sync:
                parameter.register_post_accumulate_grad_hook(self._after_backward)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def reduce_gradients(self) -> None:
        """Average the gradients if `sync` is true; otherwise backward has done so."""
        for parameter in self.parameters():
            if self.sync and parameter.grad is not None:
                self._reduce(parameter.grad)

    def _after_backward(self, parameter: Tensor) -> None:
        self._backwards[parameter] += 1
        if self._backwards[parameter] % self._iterations == 0 and parameter.grad is not None:
            self._reduce(parameter.grad)

    def _reduce(self, gradient: Tensor) -> None:
        distributed.all_reduce(gradient, group=self.group)
        gradient.div_(self._divisor)
