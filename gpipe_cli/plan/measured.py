"""Measure what layers cost on this machine, and run plans to verify their predictions.

Small micro-batches are less efficient and workers slow each other down, so nothing is scaled: at each size of
micro-batch, the layers are measured for their shares, and a short pipeline of them for the time they take together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.streams import synchronize
from gpipe_cli.balance.result import TimedLayer
from gpipe_cli.balance.solver import solve
from gpipe_cli.pipeline.gpipe import GPipe, PlainPipe
from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import Value, moved
from gpipe_cli.pipeline.partitioning import move_to_devices
from gpipe_cli.plan.costs import BackwardSplit, LayerCosts
from gpipe_cli.plan.prediction import Prediction
from gpipe_cli.plan.search_space import PlanShape
from gpipe_cli.profiling.cache import ProfileCache
from gpipe_cli.profiling.layers import Sample, frozen_layers, preserved
from gpipe_cli.profiling.phase_times import PER_PARTITION, PhaseTimes

SECONDS_OF_PHASES = 0.6
"""For pipelines whose steps are so short that the least number of them takes less."""
MAX_ROUNDS = 15
LAYER_RUNS, PHASE_RUNS = 8, 15
"""How often the layers run alone and in pipelines to be measured, if a run takes long."""


@final
@dataclass(frozen=True)
class MeasuredCosts:
    """At one size of micro-batch."""

    layers: Sequence[TimedLayer]
    phases: PhaseTimes
    frozen_layers: int = 0
    recomputed_from: int = 0
    """The first layer of the partitions that recomputed while the phases were measured."""

    def costs(self, transfer: Sequence[float] | None) -> LayerCosts:
        """The phases of the pipeline, divided among the layers by what they take alone."""
        phases = self.phases
        forward_ms = [layer.forward_ms for layer in self.layers]
        by_forward = partial(_divided, shares=forward_ms)
        by_backward = partial(_divided, shares=[layer.backward_ms for layer in self.layers])
        return LayerCosts(
            by_forward(phases.forward),
            by_backward(phases.backward),
            recompute=by_forward(phases.recompute, measured_from=self.recomputed_from),
            transfer=transfer,
            split=BackwardSplit(phases.input_grad, phases.weight_grad),
            checkpointed=(by_forward(phases.checkpointed_forward), by_backward(phases.checkpointed_backward)),
            frozen_layers=self.frozen_layers,
        )


@final
class CostMeasurer:
    """`measure` measures, `costs` answers from what it has measured."""

    def __init__(
        self,
        module: nn.Sequential,
        sample_of: Callable[[int], Sample],
        devices: Sequence[torch.device],
        profiles: ProfileCache,
        *,
        cores: int,
        apart: bool,
        transfer_of: Callable[[int], Sequence[float]] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`sample_of` gives one of so many micro-batches; `apart`: every device is a machine like this one.

        `say` receives a line about what is measured next.
        """
        self._module, self._sample_of, self._devices = module, sample_of, list(devices)
        self._profiles, self._cores, self._apart = profiles, cores, apart
        self._transfer_of, self._say = transfer_of, say
        self._workers = _worker_counts(1 if apart else min(len(devices), len(module)), cores)
        self._measured: dict[tuple[int, int], MeasuredCosts] = {}
        """By the number of micro-batches and of workers."""

    def measure(self, chunks: Sequence[int], deadline: float) -> list[int]:
        """The numbers of micro-batches that there was time for, at least the first that runs."""
        measured: list[int] = []
        refused: Exception | None = None
        seconds_per_pass = 0.0
        for place, number in enumerate(sorted(chunks, key=_priority), 1):
            begin = time.monotonic()
            if measured and begin + seconds_per_pass * self._passes(number) > deadline:
                continue
            what = "one device with the whole mini-batch" if number == 1 else f"chunks={number}"
            self._say(
                f"measuring {what} ({place} of {len(chunks)} sizes, at most {max(0.0, deadline - begin):.0f} s left)"
            )
            try:
                self._measure(number)
            except (ValueError, RuntimeError) as error:
                # Batch norm, for example, refuses a micro-batch of a single row; larger ones may work.
                refused = error
                continue
            # The next size is less efficient or more, but not by much.
            seconds_per_pass = (time.monotonic() - begin) / self._passes(number)
            measured.append(number)
        if refused is not None and not measured:
            raise refused
        return measured

    def costs(self, shape: PlanShape) -> LayerCosts:
        """Those of a shape whose size of micro-batch was measured."""
        workers = next((count for count in self._workers if count >= shape.devices), self._workers[-1])
        transfer = self._transfer_of(shape.chunks) if self._transfer_of else None
        return self._measured[shape.chunks, workers].costs(transfer)

    def _passes(self, chunks: int) -> float:
        """About how many forwards and backwards of a whole mini-batch by all cores it takes to measure this size."""
        total = 0.0
        for workers in self._workers if chunks > 1 else (1,):
            layers = LAYER_RUNS * (1 if workers == 1 else self._cores)
            total += layers / chunks + PHASE_RUNS * min(chunks, PER_PARTITION * workers) / chunks
        return total

    def _measure(self, chunks: int) -> None:
        sample = self._sample_of(chunks).to(self._devices[0])
        for workers in self._workers:
            # One device has all cores to itself; workers have one each.
            with intra_op_threads(self._cores if workers == 1 else 1):
                if workers == 1 or chunks > 1:
                    self._measured[chunks, workers] = self._measure_workers(chunks, sample, workers)

    def _measure_workers(self, chunks: int, sample: Sample, workers: int) -> MeasuredCosts:
        devices = self._devices[:workers]
        return measure_costs(self._module, sample, devices, self._profiles, chunks=chunks, cores=self._cores)


def measure_costs(
    module: nn.Sequential,
    sample: Sample,
    devices: Sequence[torch.device],
    profiles: ProfileCache,
    *,
    chunks: int,
    cores: int,
) -> MeasuredCosts:
    """Measure the layers one by one, and a short pipeline of them on all devices; `sample` is a micro-batch."""
    layers = profiles.times(module, sample, seconds=0.0)
    # An even balance keeps all workers busy, so that they disturb each other as they will in training.
    balance = solve([layer.forward_ms + layer.backward_ms for layer in layers], len(devices)).balance
    limit = cores if devices[0].type == "cpu" else None
    phases = profiles.phases(module, sample, balance, devices, chunks, SECONDS_OF_PHASES, cores=limit)
    frozen = frozen_layers(module, sample)
    begins = (begin for begin, end in pairwise([0, *accumulate(balance)]) if end > frozen)
    return MeasuredCosts(layers, phases, frozen, next(begins, 0))


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _worker_counts(most: int, cores: int) -> list[int]:
    """How many workers are measured together: one, as many as there are cores, and all."""
    return sorted({1, min(cores, most), most})


def _priority(chunks: int) -> tuple[bool, int]:
    """First the plain run, which every plan is compared with, then the smallest micro-batch, then ever larger ones."""
    return chunks > 1, -chunks


def _divided(total: float, shares: Sequence[float], measured_from: int = 0) -> list[float]:
    """measured_from: the layers before it are not in the total, and get as much in proportion."""
    whole = sum(shares[measured_from:]) or 1.0
    return [total * share / whole for share in shares]


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
    """The plans with the median times of their steps, or without if there was no time to run them.

    The plans take turns, so that whatever slows the machine down slows all of them.
    """
    deadline = time.monotonic() + seconds
    times: list[list[float]] = [[] for _ in plans]
    with preserved(module, device=True), ExitStack() as stack:
        pipes = [_pipe(plan, module, devices) for plan in plans]
        for pipe in pipes:
            stack.callback(pipe.close)
        for number in range(MAX_ROUNDS + 1):
            for plan, pipe, taken in zip(plans, pipes, times, strict=True):
                if time.monotonic() > deadline:
                    break
                with intra_op_threads(cores if plan.shape.devices == 1 else 1):
                    seconds_taken = _step(pipe, module, batch, loss, devices)
                if number > 0:  # the first one warms up
                    taken.append(1000 * seconds_taken)
    return [
        replace(plan, measured_ms=statistics.median(taken)) if taken else plan
        for plan, taken in zip(plans, times, strict=True)
    ]


def _pipe(plan: Prediction, module: nn.Sequential, devices: Sequence[torch.device]) -> GPipe | PlainPipe:
    if plan.is_plain:
        return PlainPipe(module, chunks=plan.shape.chunks, device=devices[0])
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
) -> float:
    for parameter in module.parameters():
        parameter.grad = None
    # The plan before this one had the same layers on devices of its own choice.
    move_to_devices(pipe.partitions, pipe.devices)
    input, target = moved(batch[0], devices[0]), batch[1].to(pipe.output_device)
    # A step returns before accelerators have run it, and the copies of its input may still be under way.
    synchronize(devices)
    begin = time.perf_counter()
    pipe.step(input, target, loss, key=0)
    synchronize(devices)
    return time.perf_counter() - begin
