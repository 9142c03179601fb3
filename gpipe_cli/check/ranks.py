"""Whether processes exchange tensors: a sum over all ranks, and a ring in which each sends to the next.

One rank per accelerator, connected as `engine=processes` connects them; on a CPU two ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.check.children import TIMEOUT, can_start_children, run_in_children
from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.check.timing import median_seconds
from gpipe_cli.distributed.groups import backends_for
from gpipe_cli.errors import ConfigError, GpipeError
from gpipe_cli.launch.rank_files import RankFiles
from gpipe_cli.launch.rank_setup import connect_ranks

SIZE = 16 * 2**20
"""Bytes of the tensors."""
NAME = "ranks"


def check_ranks(machine: Machine) -> Iterator[Row]:
    devices = machine.accelerators or [torch.device("cpu")] * 2
    if not can_start_children():
        yield Row(NAME, Verdict.SKIPPED, "gpipe starts its ranks on Linux only")
    elif len(devices) == 1:
        yield Row(NAME, Verdict.SKIPPED, f"needs a second accelerator beside {devices[0]}")
    else:
        yield _exchange(devices)


def _exchange(devices: Sequence[torch.device]) -> Row:
    try:
        backends_for(devices[0])
    except ConfigError as error:
        result, _, to_do = str(error).partition("; ")
        return Row(NAME, Verdict.NOTE, result, to_do=f"engine=processes cannot be used: {to_do}")
    try:
        return judge_exchange(len(devices), run_in_children("ranks", devices))
    except GpipeError as error:
        to_do = "engine=processes will fail in the same way; engine=threads does not need ranks"
        if is_accelerator(devices[0]):
            to_do += (
                "; NCCL_DEBUG=INFO gpipe check shows NCCL's messages, NCCL_P2P_DISABLE=1 avoids direct copies"
            )
        return Row(NAME, Verdict.PROBLEM, str(error), to_do=to_do)


def judge_exchange(ranks: int, figures: Mapping[str, Any]) -> Row:
    result = (
        f"{ranks} ranks with {figures['backend']}: a sum takes {figures['all_reduce_ms']:.1f} ms for 16 MiB, "
        f"a ring of sends {figures['send_gb_per_second']:.1f} GB/s"
    )
    if figures["intact"]:
        return Row(NAME, Verdict.OK, result, figures)
    to_do = "ranks receive other values than were sent: update driver and NCCL, or use engine=threads"
    return Row(NAME, Verdict.PROBLEM, result, figures, to_do)


def run_part(files: RankFiles, devices: Sequence[torch.device]) -> Mapping[str, Any]:
    rank, size = int(os.environ["RANK"]), len(devices)
    device = devices[rank]
    with connect_ranks(files, data_parallel=1, step_timeout=TIMEOUT, device=device) as world:
        mine = torch.full((SIZE // 4,), float(rank + 1), device=device)
        total, received = mine.clone(), torch.empty_like(mine)
        distributed.all_reduce(total)
        _send_to_next(mine, received, rank, size)
        before = (rank - 1) % size
        intact = bool((total == size * (size + 1) / 2).all()) and bool((received == before + 1).all())
        sending = median_seconds(lambda: _send_to_next(mine, received, rank, size), [device])
        reducing = median_seconds(lambda: distributed.all_reduce(total), [device])
        return {
            "backend": distributed.get_backend_config().split(",")[-1].rpartition(":")[2],
            "intact": bool(world.min(intact)),
            "all_reduce_ms": 1e3 * reducing,
            "send_gb_per_second": SIZE / sending / 1e9,
        }


def _send_to_next(mine: Tensor, received: Tensor, rank: int, size: int) -> None:
    operations = [
        distributed.P2POp(distributed.isend, mine, (rank + 1) % size),
        distributed.P2POp(distributed.irecv, received, (rank - 1) % size),
    ]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()
