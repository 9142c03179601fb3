"""How a rank connects to the others and is supervised, whether gpipe or torchrun started it.

Either way every rank runs the whole command; rank 0 prints and writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, final

import torch
from torch import distributed
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # public, see torch's docs

from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.accelerator.streams import set_current_device
from gpipe_cli.distributed.groups import backends_for, setup_process_groups
from gpipe_cli.distributed.world import World
from gpipe_cli.errors import ConfigError, GpipeError, PeerError, Stopped
from gpipe_cli.launch.rank import exit_report, is_rank
from gpipe_cli.launch.rank_files import ExitReport, RankFiles
from gpipe_cli.report.formatting import describe

if TYPE_CHECKING:  # most processes are no rank of torchrun's, and need no monitor
    from gpipe_cli.launch.rank_monitor import RankMonitor

LOST_PEER_MESSAGES = ("gloo", "Connection closed by peer", "Connection reset by peer", "Socket Timeout")
"""Parts of torch's messages about a peer that died; torch raises a plain RuntimeError for most of them."""
LAUNCHER_MARGIN = 60.0
"""Seconds added to torch's timeout, so that the launcher is the first to report that a step takes too long."""
PRACTICALLY_FOREVER = timedelta(days=7)


@final
@dataclass(frozen=True)
class Connected:
    files: RankFiles
    """Through which this rank communicates with its launcher, or with its monitor."""
    monitor: RankMonitor | None = None
    """If torchrun started this rank."""


_connected: list[Connected] = []
"""How this process is connected, if it is: like torch's groups, there is one per process."""


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
    if files is not None:  # all ranks are on this machine: listen on no other interface
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    else:
        from gpipe_cli.launch.rank_monitor import choose_interface

        choose_interface()
    backends = backends_for(device)
    # Before the backend starts: what is given no device, by the backend or by a layer, goes to the current one, and all
    # ranks of a machine would use the first.
    set_current_device(device)
    # torch warns that NCCL runs single sends of a bound device in the order of posting. Every order that ranks post
    # allows that (docs/how-to/processes.md).
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    with lost_peer_as_peer_error(), _reports(files, step_timeout) as store, lost_peer_as_peer_error():
        timeout = _timeout(step_timeout)
        distributed.init_process_group(
            backends,
            store=store,
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
            world.max(0)  # a barrier: torchrun ends all other ranks as soon as one is missing
        finally:
            distributed.destroy_process_group()


def connected_files() -> RankFiles | None:
    """The files through which this rank communicates while it is connected; None for a process that is no rank."""
    return _connected[0].files if _connected else None


@contextmanager
def _reports(files: RankFiles | None, step_timeout: float | None) -> Iterator[Store]:
    """Inside, this rank is supervised; yields the store through which the ranks meet.

    The launcher supervises its ranks, and each writes its exit report when all else is done. Under torchrun a monitor
    does, which must know of a failure before the other ranks notice its consequences.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        if files is not None:
            _connected[:] = [Connected(files)]
            yield FileStore(str(files.store), size)
            return
        from gpipe_cli.launch.rank_monitor import connect_store, silence_of, start_monitor
        from gpipe_cli.launch.rank_states import STARTING_SECONDS

        silence = silence_of(step_timeout)
        store = connect_store(max(silence, STARTING_SECONDS))
        monitor = start_monitor(store, silence, step_timeout)
        _connected[:] = [Connected(monitor.files, monitor)]
        try:
            yield store
        except BaseException as error:
            monitor.files.write_exit_report(rank, exit_report(error))
            raise
        monitor.files.write_exit_report(rank, ExitReport(0, time=time.monotonic()))
    finally:
        _connected.clear()


def _timeout(step_timeout: float | None) -> timedelta:
    return PRACTICALLY_FOREVER if step_timeout is None else timedelta(seconds=step_timeout + LAUNCHER_MARGIN)


@contextmanager
def lost_peer_as_peer_error() -> Iterator[None]:
    """Inside, torch's errors about a lost peer become a PeerError, which names the rank that failed if it is known."""
    try:
        yield
    except Exception as error:
        lost_peer = isinstance(error, distributed.DistError) or (
            isinstance(error, RuntimeError) and any(part in str(error) for part in LOST_PEER_MESSAGES)
        )
        if not lost_peer:
            raise
        lost = PeerError(f"another rank is gone: {describe(error)}")
        raise _root_cause(lost) from error


def _root_cause(lost: PeerError) -> GpipeError:
    """The error of the rank that failed first, as far as the monitors know; else that of this rank."""
    monitor = _connected[0].monitor if _connected else None
    if monitor is None:
        return lost
    monitor.files.write_exit_report(int(os.environ["RANK"]), exit_report(lost))
    return monitor.verdict() or lost


def describe_ranks(workers: Sequence[int], replicas: int) -> list[str]:
    """The part of the model that each rank holds, for messages; workers: that of each partition."""
    descriptions = []
    for replica in range(replicas):
        of_replica = f" of replica {replica}" if replicas > 1 else ""
        for worker in range(max(workers) + 1):
            own = [partition for partition, owner in enumerate(workers) if owner == worker]
            noun = "partition" if len(own) == 1 else "partitions"
            descriptions.append(f"{noun} {', '.join(map(str, own))}{of_replica}")
    return descriptions
