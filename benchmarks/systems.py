"""The systems that are compared: plain PyTorch, gpipe, torchgpipe and torch.distributed.pipelining.

A system prepares a case in a process of its own and returns a function that runs one step: forward and backward of the
mini-batch in `CHUNKS` micro-batches, with the gradients of the mean loss in `.grad`. Nothing here measures time. A peer
is imported only when it is prepared, because it may not be installed.
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
class Rendezvous:
    """The rank of this process within its system, and a new file that initializes the process group."""

    rank: int
    file: str


@final
@dataclass(frozen=True)
class System:
    prepare: Callable[[Case, Rendezvous], Step]
    threads: int = 1
    """Intra-op threads of each thread that computes."""
    processes: int = 1


def _plain(case: Case, rendezvous: Rendezvous, *, chunks: int) -> Step:
    """Gradient accumulation in a loop."""

    def step() -> None:
        for input, target in zip(case.input.chunk(chunks), case.target.chunk(chunks), strict=True):
            (case.loss(case.model(input), target) / chunks).backward()

    return step


def _naive(case: Case, rendezvous: Rendezvous) -> Step:
    """The model as its author wrote it, the whole mini-batch at once: what `device_map` runs, without the copies.

    Its partitions work one after the other, so one core works at a time, as one device does.
    """
    model = case.original or case.model
    return lambda: case.loss(model(case.input), case.target).backward()


def _run_apart(case: Case, rendezvous: Rendezvous, *, ranks: Sequence[int]) -> Step:
    """No pipeline: each partition processes all micro-batches independently and never waits.

    Its gradients are not those of the loss. It measures the largest speed-up that the machine and the interpreter allow
    two workers, before any pipeline bubble.
    """
    boundaries = [torch.randn(boundary.shape) for boundary in _boundary_examples(case)]
    works = [
        partial(_run_alone, _partitions(case)[rank], boundaries[rank], rank > 0)
        for rank in ranks or (rendezvous.rank,)
    ]
    if len(works) == 1:
        return works[0]
    pool = ThreadPoolExecutor(len(works), initializer=torch.set_num_threads, initargs=(1,))
    return lambda: [future.result() for future in [pool.submit(work) for work in works]].clear()


def _run_alone(partition: nn.Module, input: Tensor, needs_grad: bool) -> None:
    for _ in range(CHUNKS):
        output = partition(input.detach().requires_grad_(needs_grad))
        output.backward(torch.ones_like(output))


def _gpipe(case: Case, rendezvous: Rendezvous, *, schedule: str, checkpoint: str) -> Step:
    pipe = _gpipe_pipe(case, schedule, checkpoint)
    return lambda: pipe.step(case.input, case.target, case.loss)


def _gpipe_backward(case: Case, rendezvous: Rendezvous, *, schedule: str, checkpoint: str) -> Step:
    """As with torchgpipe, the caller computes the loss and calls backward."""
    pipe = _gpipe_pipe(case, schedule, checkpoint)
    return lambda: case.loss(pipe(case.input), case.target).backward()


def _gpipe_recorded(case: Case, rendezvous: Rendezvous) -> Step:
    """A step as `gpipe profile timeline=true` records it, including reading the recording."""
    from gpipe_cli.profiling.timeline import ActionRecorder

    pipe = _gpipe_pipe(case, "gpipe", "never")
    pipe.recorder = record = ActionRecorder(pipe.devices)

    def step() -> None:
        pipe.step(case.input, case.target, case.loss)
        record.spans()
        record.clear()

    return step


def _gpipe_auto(case: Case, rendezvous: Rendezvous) -> Step:
    """The order that schedule=auto finds for the case's balance, from costs that are measured here and now."""
    from gpipe_cli.plan.measured import measure_costs
    from gpipe_cli.plan.order_plans import order_problems, search_order
    from gpipe_cli.profiling.profile_cache import ProfileCache
    from gpipe_cli.profiling.records import Sample
    from gpipe_cli.schedule.spec import PipelineSpec

    devices, cores = [torch.device(device) for device in DEVICES], len(DEVICES)
    sample = Sample(case.input.chunk(CHUNKS)[0], case.target.chunk(CHUNKS)[0], case.loss)
    measured = measure_costs(case.model, sample, devices, ProfileCache(None), chunks=CHUNKS, cores=cores)
    spec = PipelineSpec("1f1b", len(case.balance), CHUNKS, devices=len(devices), cores=cores)
    costs = measured.costs(None).partitions(case.balance, spec)
    found = search_order(order_problems(spec, costs))
    pipe = _gpipe_pipe(case, found.schedule, "never")
    return lambda: pipe.step(case.input, case.target, case.loss)


def _gpipe_pipe(case: Case, schedule: Any, checkpoint: str) -> Any:
    from gpipe_cli import GPipe

    balance = case.interleaved_balance if schedule == "interleaved" else case.balance
    return GPipe(
        case.model, balance, devices=DEVICES, chunks=CHUNKS, checkpoint=checkpoint, schedule=schedule
    )


def _torchgpipe(case: Case, rendezvous: Rendezvous, *, checkpoint: str) -> Step:
    import torchgpipe

    pipe = torchgpipe.GPipe(case.model, case.balance, devices=DEVICES, chunks=CHUNKS, checkpoint=checkpoint)
    return lambda: case.loss(pipe(case.input), case.target).backward()


def join_process_group(rendezvous: Rendezvous, processes: int) -> None:
    """Initialize the process group of a system."""
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous.file}", rank=rendezvous.rank, world_size=processes
    )


def _torch_pipelining(case: Case, rendezvous: Rendezvous, *, schedule: str) -> Step:
    join_process_group(rendezvous, len(case.balance))
    return torch_step(case, rendezvous, schedule)


def torch_step(case: Case, rendezvous: Rendezvous, schedule: str) -> Step:
    """torch.distributed.pipelining without changes, in an initialized process group."""
    from torch.distributed import pipelining

    begin = sum(case.balance[: rendezvous.rank])
    partition = case.model[begin : begin + case.balance[rendezvous.rank]]
    boundaries = _boundary_examples(case)
    stage = pipelining.PipelineStage(
        partition,
        rendezvous.rank,
        len(case.balance),
        torch.device("cpu"),
        # Without examples torch 2.13 finds shapes by a real forward on uninitialized memory.
        input_args=(boundaries[rendezvous.rank],),
        output_args=(boundaries[rendezvous.rank + 1],),
    )
    schedule_class = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[schedule]
    pipeline = schedule_class(
        stage, CHUNKS, loss_fn=lambda output, target: case.loss(output, target) / CHUNKS, scale_grads=False
    )
    if rendezvous.rank == 0:
        return lambda: pipeline.step(case.input, return_outputs=False)
    return lambda: pipeline.step(target=case.target, losses=[], return_outputs=False)


def _boundary_examples(case: Case) -> list[Tensor]:
    """The input of each partition and the output of the last, as meta tensors."""
    case.model.eval()  # keeps the running statistics of batch norm unchanged
    values = [case.input.chunk(CHUNKS)[0]]
    with torch.no_grad():
        for partition in _partitions(case):
            values.append(partition(values[-1]))
    case.model.train()
    return [values[0].to("meta"), *(value.to("meta").requires_grad_() for value in values[1:])]


def _partitions(case: Case) -> list[nn.Module]:
    begins = [sum(case.balance[:index]) for index in range(len(case.balance))]
    return [case.model[begin : begin + size] for begin, size in zip(begins, case.balance, strict=True)]


SYSTEMS: Mapping[str, System] = {
    "plain": System(partial(_plain, chunks=CHUNKS)),
    "plain-2-threads": System(partial(_plain, chunks=CHUNKS), threads=2),
    "whole-batch-2-threads": System(partial(_plain, chunks=1), threads=2),
    "naive": System(_naive),
    "apart-2-threads": System(partial(_run_apart, ranks=(0, 1))),
    "apart-2-processes": System(partial(_run_apart, ranks=()), processes=2),
    "gpipe": System(partial(_gpipe, schedule="gpipe", checkpoint="never")),
    "gpipe-backward": System(partial(_gpipe_backward, schedule="gpipe", checkpoint="never")),
    "gpipe-except_last": System(partial(_gpipe, schedule="gpipe", checkpoint="except_last")),
    "gpipe-recorded": System(_gpipe_recorded),
    "1f1b": System(partial(_gpipe, schedule="1f1b", checkpoint="never")),
    "1f1b-except_last": System(partial(_gpipe, schedule="1f1b", checkpoint="except_last")),
    "interleaved": System(partial(_gpipe, schedule="interleaved", checkpoint="never")),
    "zero_bubble": System(partial(_gpipe, schedule="zero_bubble", checkpoint="never")),
    "auto": System(_gpipe_auto),
    "torchgpipe": System(partial(_torchgpipe, checkpoint="never")),
    "torchgpipe-except_last": System(partial(_torchgpipe, checkpoint="except_last")),
    "torch-gpipe": System(partial(_torch_pipelining, schedule="gpipe"), processes=2),
    "torch-1f1b": System(partial(_torch_pipelining, schedule="1f1b"), processes=2),
}
