"""The ways to train a case for one step: plain PyTorch, gpipe, and the peers.

A system prepares a case, in a process of its own, and gives a function that runs one step: forward and
backward of the mini-batch in `CHUNKS` micro-batches, the gradients of the mean loss in `.grad`.
Knows nothing of clocks. Peers are imported when they are prepared, since they need not be installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from benchmarks.cases import Case

CHUNKS = 8
DEVICES = ["cpu", "cpu"]
Step = Callable[[], None]


@final
@dataclass(frozen=True)
class Seat:
    """Which of a system's processes this is, and a fresh file by which they find each other."""

    rank: int
    meeting_file: str


@final
@dataclass(frozen=True)
class System:
    prepare: Callable[[Case, Seat], Step]
    threads: int = 1
    """Intra-op threads of whatever thread computes."""
    processes: int = 1


def _plain(case: Case, seat: Seat, *, chunks: int) -> Step:
    """Gradient accumulation in a loop."""

    def step() -> None:
        for input, target in zip(case.input.chunk(chunks), case.target.chunk(chunks), strict=True):
            (case.loss(case.model(input), target) / chunks).backward()

    return step


def _apart(case: Case, seat: Seat, *, ranks: Sequence[int]) -> Step:
    """No pipeline: each partition does its own work for all micro-batches and waits for nobody.

    It learns nothing, and its gradients are not those of the loss. It tells how much of a speed-up the machine and the
    interpreter leave to any two workers, before the first bubble.
    """
    borders = [torch.randn(border.shape) for border in _border_examples(case)]
    works = [partial(_alone, _parts(case)[rank], borders[rank], rank > 0) for rank in ranks or (seat.rank,)]
    if len(works) == 1:
        return works[0]
    pool = ThreadPoolExecutor(len(works), initializer=torch.set_num_threads, initargs=(1,))
    return lambda: [future.result() for future in [pool.submit(work) for work in works]].clear()


def _alone(part: nn.Module, input: Tensor, needs_grad: bool) -> None:
    for _ in range(CHUNKS):
        output = part(input.detach().requires_grad_(needs_grad))
        output.backward(torch.ones_like(output))


def _gpipe(case: Case, seat: Seat, *, schedule: str, checkpoint: str) -> Step:
    pipe = _gpipe_pipe(case, schedule, checkpoint)
    return lambda: pipe.step(case.input, case.target, case.loss)


def _gpipe_backward(case: Case, seat: Seat, *, schedule: str, checkpoint: str) -> Step:
    """As with torchgpipe: the loss is the caller's."""
    pipe = _gpipe_pipe(case, schedule, checkpoint)
    return lambda: case.loss(pipe(case.input), case.target).backward()


def _gpipe_recorded(case: Case, seat: Seat) -> Step:
    """What `gpipe profile timeline=true` does to a step, the reading of the record included."""
    from gpipe_cli.profiling.action_recorder import ActionRecorder

    pipe = _gpipe_pipe(case, "gpipe", "never")
    pipe.recorder = record = ActionRecorder(pipe.devices)

    def step() -> None:
        pipe.step(case.input, case.target, case.loss)
        record.pieces()
        record.clear()

    return step


def _gpipe_pipe(case: Case, schedule: str, checkpoint: str) -> Any:
    from gpipe_cli import GPipe

    balance = case.interleaved_balance if schedule == "interleaved" else case.balance
    return GPipe(
        case.model, balance, devices=DEVICES, chunks=CHUNKS, checkpoint=checkpoint, schedule=schedule
    )


def _torchgpipe(case: Case, seat: Seat, *, checkpoint: str) -> Step:
    import torchgpipe

    pipe = torchgpipe.GPipe(case.model, case.balance, devices=DEVICES, chunks=CHUNKS, checkpoint=checkpoint)
    return lambda: case.loss(pipe(case.input), case.target).backward()


def meet(seat: Seat, processes: int) -> None:
    """Let the processes of a system find each other."""
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{seat.meeting_file}", rank=seat.rank, world_size=processes
    )


def _torch_pipelining(case: Case, seat: Seat, *, schedule: str) -> Step:
    meet(seat, len(case.balance))
    return torch_step(case, seat, schedule)


def torch_step(case: Case, seat: Seat, schedule: str) -> Step:
    """torch.distributed.pipelining as it comes, for processes that have met."""
    from torch.distributed import pipelining

    begin = sum(case.balance[: seat.rank])
    part = case.model[begin : begin + case.balance[seat.rank]]
    borders = _border_examples(case)
    stage = pipelining.PipelineStage(
        part,
        seat.rank,
        len(case.balance),
        torch.device("cpu"),
        # Without examples torch 2.13 finds shapes by a real forward on uninitialised memory.
        input_args=(borders[seat.rank],),
        output_args=(borders[seat.rank + 1],),
    )
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[schedule]
    runner = kind(
        stage, CHUNKS, loss_fn=lambda output, target: case.loss(output, target) / CHUNKS, scale_grads=False
    )
    if seat.rank == 0:
        return lambda: runner.step(case.input, return_outputs=False)
    return lambda: runner.step(target=case.target, losses=[], return_outputs=False)


def _border_examples(case: Case) -> list[Tensor]:
    """What enters each partition and leaves the last, as tensors without memory."""
    case.model.eval()  # so that the statistics of batch norms stay as they are
    values = [case.input.chunk(CHUNKS)[0]]
    with torch.no_grad():
        for part in _parts(case):
            values.append(part(values[-1]))
    case.model.train()
    return [values[0].to("meta"), *(value.to("meta").requires_grad_() for value in values[1:])]


def _parts(case: Case) -> list[nn.Module]:
    begins = [sum(case.balance[:index]) for index in range(len(case.balance))]
    return [case.model[begin : begin + size] for begin, size in zip(begins, case.balance, strict=True)]


SYSTEMS: Mapping[str, System] = {
    "plain": System(partial(_plain, chunks=CHUNKS)),
    "plain-2-threads": System(partial(_plain, chunks=CHUNKS), threads=2),
    "whole-batch-2-threads": System(partial(_plain, chunks=1), threads=2),
    "apart-2-threads": System(partial(_apart, ranks=(0, 1))),
    "apart-2-processes": System(partial(_apart, ranks=()), processes=2),
    "gpipe": System(partial(_gpipe, schedule="gpipe", checkpoint="never")),
    "gpipe-backward": System(partial(_gpipe_backward, schedule="gpipe", checkpoint="never")),
    "gpipe-except_last": System(partial(_gpipe, schedule="gpipe", checkpoint="except_last")),
    "gpipe-recorded": System(_gpipe_recorded),
    "1f1b": System(partial(_gpipe, schedule="1f1b", checkpoint="never")),
    "1f1b-except_last": System(partial(_gpipe, schedule="1f1b", checkpoint="except_last")),
    "interleaved": System(partial(_gpipe, schedule="interleaved", checkpoint="never")),
    "zero_bubble": System(partial(_gpipe, schedule="zero_bubble", checkpoint="never")),
    "torchgpipe": System(partial(_torchgpipe, checkpoint="never")),
    "torchgpipe-except_last": System(partial(_torchgpipe, checkpoint="except_last")),
    "torch-gpipe": System(partial(_torch_pipelining, schedule="gpipe"), processes=2),
    "torch-1f1b": System(partial(_torch_pipelining, schedule="1f1b"), processes=2),
}
