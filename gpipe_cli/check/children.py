"""Checks in processes of their own: whether ranks exchange tensors, and whether kernels of two streams race.

The launcher and supervision of engine=processes run them. A communicator that hangs, or a driver that aborts the
process, then ends that check only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed
from torch.nn.functional import cross_entropy

from gpipe_cli.accelerator.copies import start_copy
from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.accelerator.streams import median_seconds
from gpipe_cli.check.bits import small_batch, small_model
from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.distributed.groups import backends_for
from gpipe_cli.errors import ConfigError, GpipeError, Interrupted
from gpipe_cli.launch.launcher import run_ranks
from gpipe_cli.launch.rank import run_rank
from gpipe_cli.launch.rank_files import Heartbeats, RankFiles, RankTask
from gpipe_cli.launch.rank_setup import connect_ranks
from gpipe_cli.pipeline.gpipe import GPipe
from gpipe_cli.torch_internals.dispatch_modes import find_races, offers_sanitizer

TIMEOUT = 60.0
"""Seconds until the children must have finished; most of their time they import torch."""
SIZE = 16 * 2**20
"""Bytes of the tensors that ranks exchange."""
RANKS, RACES = "ranks", "stream races"

Part = Callable[[RankFiles, Sequence[torch.device]], Mapping[str, Any]]
"""What a child runs: the files it shares with the others, and the device of each child. The first returns figures."""


def can_start_children() -> bool:
    """Whether this system offers what supervision needs; only Linux does."""
    return hasattr(os, "pidfd_open")


def run_in_children(
    part: Part, devices: Sequence[torch.device], timeout: float = TIMEOUT
) -> Mapping[str, Any]:
    """Run a function of this module in one process per device; what the first returns."""
    names = [str(device) for device in devices]
    task = RankTask("check", [], job={"devices": names})
    call = f"{__name__}.run_as_child(sys.argv[1], {__name__}.{part.__name__})"
    attempt = run_ranks(task, f"import {__name__}", call, names, timeout)
    if isinstance(attempt.cause, Interrupted):  # not a result of the check: Ctrl-C ends the whole command
        raise KeyboardInterrupt from attempt.cause
    if attempt.cause is not None:
        raise attempt.cause
    assert attempt.report is not None and attempt.report.summary is not None, (
        "the first child reports figures"
    )
    return attempt.report.summary


def run_as_child(folder: str, part: Part) -> NoReturn:
    # stdout belongs to the result of the command; libraries write their notices there.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def run(files: RankFiles, task: RankTask) -> Mapping[str, Any]:
        devices = [torch.device(name) for name in task.job["devices"]]
        # The launcher ends children whose step takes too long: all of this is one step.
        with Heartbeats(files.heartbeats, len(devices)).in_step(int(os.environ["RANK"])):
            return part(files, devices)

    run_rank(folder, run)


def check_ranks(machine: Machine) -> Iterator[Row]:
    devices = machine.accelerators or [torch.device("cpu")] * 2
    if not can_start_children():
        yield Row(RANKS, Verdict.SKIPPED, "gpipe starts its ranks on Linux only")
    elif len(devices) == 1:
        yield Row(RANKS, Verdict.SKIPPED, f"needs a second accelerator beside {devices[0]}")
    else:
        yield _exchange(devices)


def _exchange(devices: Sequence[torch.device]) -> Row:
    try:
        backends_for(devices[0])
    except ConfigError as error:
        result, _, to_do = str(error).partition("; ")
        return Row(RANKS, Verdict.NOTE, result, to_do=f"engine=processes cannot be used: {to_do}")
    try:
        return judge_exchange(len(devices), run_in_children(exchange_tensors, devices))
    except GpipeError as error:
        to_do = "engine=processes will fail in the same way; engine=threads does not need ranks"
        if is_accelerator(devices[0]):
            to_do += (
                "; NCCL_DEBUG=INFO gpipe check shows NCCL's messages, NCCL_P2P_DISABLE=1 avoids direct copies"
            )
        return Row(RANKS, Verdict.PROBLEM, str(error), to_do=to_do)


def judge_exchange(ranks: int, figures: Mapping[str, Any]) -> Row:
    result = (
        f"{ranks} ranks with {figures['backend']}: a sum takes {figures['all_reduce_ms']:.1f} ms for 16 MiB, "
        f"a ring of sends {figures['send_gb_per_second']:.1f} GB/s"
    )
    if figures["intact"]:
        return Row(RANKS, Verdict.OK, result, figures)
    to_do = "ranks receive other values than were sent: update driver and NCCL, or use engine=threads"
    return Row(RANKS, Verdict.PROBLEM, result, figures, to_do)


def exchange_tensors(files: RankFiles, devices: Sequence[torch.device]) -> Mapping[str, Any]:
    """A sum over all ranks, and a ring in which each sends to the next, connected as engine=processes connects them."""
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


def check_races(machine: Machine) -> Iterator[Row]:
    traced = [device for device in machine.accelerators if offers_sanitizer(device)]
    if not traced:
        yield Row(
            RACES, Verdict.SKIPPED, "torch offers its sanitizer only for GPUs, in builds for CUDA and ROCm"
        )
    elif not can_start_children():
        yield Row(RACES, Verdict.SKIPPED, "gpipe starts the process that the sanitizer needs on Linux only")
    else:
        yield judge_races(traced[0], run_in_children(trace_streams, traced[:1]))


def judge_races(device: torch.device, figures: Mapping[str, Any]) -> Row:
    if not figures["finds_deliberate_race"]:
        result = (
            "torch's sanitizer did not report a race that was made on purpose, so its silence proves nothing"
        )
        return Row(
            RACES, Verdict.NOTE, result, figures, "use the version of torch that gpipe was tested with"
        )
    if not figures["races"]:
        result = f"torch's sanitizer reports none in copies and in a pipeline of two workers on {device}"
        return Row(RACES, Verdict.OK, result, figures)
    result = f"torch's sanitizer reports {len(figures['races'])} on {device}: {figures['races'][0]}"
    to_do = "results may change from run to run: open an issue with this output and that of gpipe env"
    return Row(RACES, Verdict.PROBLEM, result, figures, to_do)


def trace_streams(files: RankFiles, devices: Sequence[torch.device]) -> Mapping[str, Any]:
    """Run torch's own sanitizer, which finds kernels of two streams that use a tensor in no fixed order.

    It covers one device: the copies from and to the host on their streams, and a pipeline whose two workers share it.
    Copies between two devices are beyond it; the sweep of tests/accelerator covers those.
    """
    (device,) = devices
    return {
        "finds_deliberate_race": bool(find_races(lambda: _race(device))),
        "races": find_races(lambda: _copy_and_train(device)),
    }


def _race(device: torch.device) -> None:
    """Two streams write to a tensor, and neither waits for the other."""
    tensor = torch.zeros(1024, device=device)
    torch.accelerator.synchronize(device)
    for value in (1.0, 2.0):
        with torch.Stream(device):
            tensor.fill_(value)


def _copy_and_train(device: torch.device) -> None:
    images, classes = (_copied(tensor, device) for tensor in small_batch(samples=16))
    model = small_model(blocks=4, dropout=0.1)
    with GPipe(model, [6, 6], devices=[device, device], chunks=4, schedule="1f1b") as pipe:
        loss = pipe.step(images, classes, cross_entropy, key=1)
    _copied(loss, torch.device("cpu"))


def _copied(tensor: Tensor, destination: torch.device) -> Tensor:
    (copied,) = start_copy((tensor,), destination).receive()
    assert copied is not None, "a tensor was sent"
    return copied
