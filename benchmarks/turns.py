"""Pipes of one case in one process, cut and scheduled in many ways, taking turns; and what its layers cost.

For questions that compare gpipe with itself; systems are compared by `harness`, in processes of their own.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import torch
from rich.console import Console

from benchmarks.cases import Case
from benchmarks.run import QUIET
from gpipe_cli import GPipe
from gpipe_cli.profiling.layers import LayerProfile, Sample, profile_layers


@final
@dataclass(frozen=True)
class Way:
    """How a case is run."""

    balance: tuple[int, ...]
    chunks: int
    schedule: str = "gpipe"
    checkpoint: str = "never"

    def __str__(self) -> str:
        return f"{self.schedule} {self.checkpoint}, {len(self.balance)} partitions"


def milliseconds(case: Case, ways: Sequence[Way], rounds: int) -> Mapping[Way, list[float]]:
    """One step of each way in each round, after two that warm up."""
    times: dict[Way, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        pipes = {way: stack.enter_context(_pipe(case, way)) for way in ways}
        for number in range(-2, rounds):
            for way, pipe in pipes.items():
                for parameter in case.model.parameters():
                    parameter.grad = None
                begin = time.perf_counter()
                pipe.step(case.input, case.target, case.loss)
                if number >= 0:
                    times[way].append(1000 * (time.perf_counter() - begin))
    for parameter in case.model.parameters():
        parameter.grad = None
    return times


def layer_profiles(case: Case, chunks: int, seconds: float, *, busy_workers: int = 1) -> list[LayerProfile]:
    """Each layer with one micro-batch, while so many workers do the same, each with a model of its own."""
    sample = Sample(case.input.tensor_split(chunks)[0], case.target.tensor_split(chunks)[0], case.loss)
    models = [case.model, *(copy.deepcopy(case.model) for _ in range(busy_workers - 1))]
    with ThreadPoolExecutor(busy_workers) as pool:
        found = list(pool.map(lambda model: profile_layers(model, sample, seconds=seconds), models))
    return found[0]


def prepare(console: Console) -> None:
    """One intra-op thread for all, and a word if the machine is busy."""
    torch.set_num_threads(1)
    if (load := os.getloadavg()[0]) > QUIET:
        console.print(f"The machine is busy (load {load:.1f}): these figures are not to be quoted.")


def _pipe(case: Case, way: Way) -> GPipe:
    return GPipe(
        case.model,
        list(way.balance),
        devices=["cpu"] * len(way.balance),
        chunks=way.chunks,
        checkpoint=way.checkpoint,
        schedule=way.schedule,
    )
