"""Runs plans to verify their predictions, in turns, so that whatever slows the machine down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.gpipe import GPipe, PlainPipe
from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import Value, moved
from gpipe_cli.plan.measured import intra_op_threads
from gpipe_cli.plan.prediction import Prediction
from gpipe_cli.profiling.layers import preserved

MOST_ROUNDS = 15


def verify_plans(
    plans: Sequence[Prediction],
    module: nn.Sequential,
    batch: tuple[Value, Tensor],
    loss: LossFunction,
    devices: Sequence[torch.device],
    *,
    cores: int,
    seconds: float,
) -> list[Prediction]:
    """The plans with the medians of their steps; those that there was no time for without."""
    deadline = time.monotonic() + seconds
    times: list[list[float]] = [[] for _ in plans]
    with preserved(module, device=True), ExitStack() as stack:
        pipes = [_pipe(plan, module, devices) for plan in plans]
        for pipe in pipes:
            stack.callback(pipe.close)
        for number in range(MOST_ROUNDS + 1):
            for plan, pipe, taken in zip(plans, pipes, times, strict=True):
                if time.monotonic() > deadline:
                    break
                with intra_op_threads(cores if plan.shape.devices == 1 else 1):
                    seconds_taken = _step(pipe, module, batch, loss, devices, plan.shape.devices)
                if number > 0:  # the first one warms up
                    taken.append(1000 * seconds_taken)
    return [
        replace(plan, measured_ms=statistics.median(taken)) if taken else plan
        for plan, taken in zip(plans, times, strict=True)
    ]


def _pipe(plan: Prediction, module: nn.Sequential, devices: Sequence[torch.device]) -> GPipe | PlainPipe:
    if plan.is_plain:
        return PlainPipe(module, chunks=plan.shape.chunks)
    return GPipe(
        module,
        plan.balance,
        devices=devices[: plan.shape.devices],
        chunks=plan.shape.chunks,
        checkpoint=plan.shape.checkpoint,
        schedule=plan.shape.schedule,
    )


def _step(
    pipe: GPipe | PlainPipe,
    module: nn.Module,
    batch: tuple[Value, Tensor],
    loss: LossFunction,
    devices: Sequence[torch.device],
    used: int,
) -> float:
    for parameter in module.parameters():
        parameter.grad = None
    input, target = moved(batch[0], devices[0]), batch[1].to(devices[used - 1])
    begin = time.perf_counter()
    pipe.step(input, target, loss, key=0)
    # Kernels run asynchronously: without this only their launches would be timed.
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
