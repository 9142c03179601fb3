"""This process as one of several ranks: whether it is one, and how it connects to the others.

`gpipe` starts the ranks itself (`launcher`), or torchrun does, also on several machines. Either way every rank runs the
whole command; rank 0 prints and writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.accelerator.streams import set_current_device
from gpipe_cli.distributed.backends import backends_for
from gpipe_cli.distributed.groups import setup_process_groups
from gpipe_cli.distributed.world import World
from gpipe_cli.errors import ConfigError, PeerError, Stopped
from gpipe_cli.launch.rank_files import RankFiles
from gpipe_cli.report.formatting import describe
from gpipe_cli.schedule.action import partitions_of

LOST_PEER_MESSAGES = ("gloo", "Connection closed by peer", "Connection reset by peer", "Socket Timeout")
"""Parts of torch's messages about a peer that died; torch raises a plain RuntimeError for most of them."""
SUPERVISOR_MARGIN = 60.0
"""Seconds added to torch's timeout, so that the supervisor is the first to report that a step takes too long."""
PRACTICALLY_FOREVER = timedelta(days=7)


def is_rank() -> bool:
    return distributed.is_torchelastic_launched()


def is_main_process() -> bool:
    """Whether this process prints and writes: rank 0, or the only process."""
    return not is_rank() or os.environ["RANK"] == "0"


@contextmanager
def connect_ranks(
    files: RankFiles | None, *, data_parallel: int, step_timeout: float | None, device: torch.device
) -> Iterator[World]:
    """Connect the ranks of a job, in the process groups `data` and `pipe`; a process that is no rank has none.

    files: those of the launcher; None under torchrun, which tells the ranks how to meet by environment variables.
    device: that of this rank; an accelerator becomes the current one.
    """
    if not is_rank():
        yield World()
        return
    size = int(os.environ["WORLD_SIZE"])
    if size % data_parallel:
        raise ConfigError(
            f"data_parallel={data_parallel}: there are {size} processes; every replica needs the same number of them"
        )
    timeout = _timeout(step_timeout, has_supervisor=files is not None)
    if files is not None:  # all ranks are on this machine: listen on no other interface
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    backends = backends_for(device)
    # Before the backend starts: what is given no device, by the backend or by a layer, goes to the current one, and all
    # ranks of a machine would use the first.
    set_current_device(device)
    # torch warns that NCCL runs single sends of a bound device in the order of posting. Every order that ranks post
    # allows that (docs/how-to/more-machines.md).
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    with _lost_peer_as_peer_error():
        distributed.init_process_group(
            backends,
            init_method="env://" if files is None else files.init_method,
            rank=int(os.environ["RANK"]),
            world_size=size,
            timeout=timeout,
            # Binds the process to its device: one communicator per group then, made at once by all of its ranks,
            # instead of one per pair of ranks when these first meet.
            device_id=device if is_accelerator(device) else None,
        )
        try:
            groups = [("data", data_parallel), ("pipe", size // data_parallel)]
            setup_process_groups(groups, timeout=timeout)
            world = World.current()
            try:
                yield world
            except Stopped:
                # A request to stop goes to all ranks, so all of them reach this barrier. After any other error a rank
                # must not wait, because its peers may never come.
                world.max(0)
                raise
            world.max(0)  # a barrier: torch ends all other ranks as soon as one is missing
        finally:
            distributed.destroy_process_group()


def _timeout(step_timeout: float | None, *, has_supervisor: bool) -> timedelta | None:
    """None stands for torch's own default."""
    if not has_supervisor:
        return None if step_timeout is None else timedelta(seconds=step_timeout)
    return (
        PRACTICALLY_FOREVER if step_timeout is None else timedelta(seconds=step_timeout + SUPERVISOR_MARGIN)
    )


@contextmanager
def _lost_peer_as_peer_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        lost_peer = isinstance(error, distributed.DistError) or (
            isinstance(error, RuntimeError) and any(part in str(error) for part in LOST_PEER_MESSAGES)
        )
        if not lost_peer:
            raise
        raise PeerError(f"another rank is gone: {describe(error)}") from error


def describe_ranks(partitions: int, devices: Sequence[torch.device], replicas: int) -> list[str]:
    """The part of the model that each rank holds, for messages."""
    descriptions = []
    for replica in range(replicas):
        of_replica = f" of replica {replica}" if replicas > 1 else ""
        for worker in range(len(devices)):
            own = list(partitions_of(worker, partitions, len(devices)))
            noun = "partition" if len(own) == 1 else "partitions"
            descriptions.append(f"{noun} {', '.join(map(str, own))}{of_replica}")
    return descriptions
