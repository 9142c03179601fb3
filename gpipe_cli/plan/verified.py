"""Run plans to verify their predictions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.devices import intra_op_threads, use_threads
from gpipe_cli.accelerator.streams import synchronize
from gpipe_cli.pipeline.gpipe import GPipe, plain_pipe
from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import Value, moved
from gpipe_cli.pipeline.partitioning import move_to_devices
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.plan.prediction import Prediction
from gpipe_cli.profiling.records import preserved

MAX_ROUNDS = 15


def verify_plans(
    plans: Sequence[Prediction],
    module: nn.Sequential,
    batch_of: Callable[[int], tuple[Value, Tensor]],
    loss: LossFunction,
    devices: Sequence[torch.device],
    *,
    cores: int,
    seconds: float,
) -> list[Prediction]:
    """The plans with the median times of their steps, or without if there was no time to run them.

    `batch_of` gives a mini-batch of a size.

    The plans take turns, so that whatever slows the machine down slows all of them.
    """
    deadline = time.monotonic() + seconds
    times: list[list[float]] = [[] for _ in plans]
    batches = {plan.batch_size: batch_of(plan.batch_size) for plan in plans}
    with preserved(module, device=True), ExitStack() as stack:
        pipes = [_pipe(plan, module, devices) for plan in plans]
        for pipe in pipes:
            stack.callback(pipe.close)
        for number in range(MAX_ROUNDS + 1):
            for plan, pipe, taken in zip(plans, pipes, times, strict=True):
                if time.monotonic() > deadline:
                    break
                with use_threads(intra_op_threads(devices[: plan.shape.devices], cores)):
                    seconds_taken = _step(pipe, module, batches[plan.batch_size], loss, devices)
                if number > 0:  # the first one warms up
                    taken.append(1000 * seconds_taken)
    return [
        replace(plan, measured_ms=statistics.median(taken)) if taken else plan
        for plan, taken in zip(plans, times, strict=True)
    ]


def _pipe(plan: Prediction, module: nn.Sequential, devices: Sequence[torch.device]) -> Pipe:
    if plan.is_plain:
        return plain_pipe(module, chunks=plan.shape.chunks, device=devices[0])
    return GPipe(
        module,
        plan.balance,
        devices=devices[: plan.shape.devices],
        chunks=plan.shape.chunks,
        checkpoint=plan.shape.checkpoint,
        schedule=plan.shape.schedule,
    )


def _step(
    pipe: Pipe,
    module: nn.Module,
    batch: tuple[Value, Tensor],
    loss: LossFunction,
    devices: Sequence[torch.device],
) -> float:
    for parameter in module.parameters():
        parameter.grad = None
    # The plan before this one had the same layers on devices of its own choice.
    move_to_devices(pipe.partitions, list(pipe.partition_devices.values()))
    input, target = moved(batch[0], pipe.input_device), batch[1].to(pipe.output_device)
    # A step returns before accelerators have run it, and the copies of its input may still be under way.
    synchronize(devices)
    begin = time.perf_counter()
    pipe.step(input, target, loss, key=0)
    synchronize(devices)
    return time.perf_counter() - begin
