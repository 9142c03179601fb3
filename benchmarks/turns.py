"""Pipes of one case in one process, cut and scheduled in many ways, taking turns.

For questions that compare gpipe with itself; systems are compared by `harness`, in processes of their own.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
from rich.console import Console

from benchmarks.cases import Case
from benchmarks.run import QUIET
from gpipe_cli import GPipe

OTHERS_AT_MOST = 0.06
"""Seconds of others for each second of a turn."""
TRIES = 4
TURN = 400.0
"""Milliseconds that a turn takes at least."""
STATISTICS = Path("/proc/stat")


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


def milliseconds(
    case: Case, ways: Sequence[Way], rounds: int, before_each: Callable[[], None] = lambda: None
) -> Mapping[Way, list[float]]:
    """A step of each way in each round, after two that warm up; `before_each` round that counts."""
    times: dict[Way, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        pipes = {way: stack.enter_context(_pipe(case, way)) for way in ways}
        for number in range(-2, rounds):
            if number >= 0:
                before_each()
            for way, pipe in pipes.items():
                taken = undisturbed(partial(_turn, pipe, case))
                if number >= 0:
                    times[way].append(taken)
    for parameter in case.model.parameters():
        parameter.grad = None
    return times


def undisturbed(turn: Callable[[], float]) -> float:
    """What a turn gives; one in which others used the machine is repeated, as long as there is hope."""
    for _ in range(TRIES):
        others, begin = _others(), time.perf_counter()
        found = turn()
        if _others() - others < OTHERS_AT_MOST * (time.perf_counter() - begin):
            break
    return found


def _others() -> float:
    """Seconds of all cores in which somebody else worked; none where the system does not tell."""
    if not STATISTICS.exists():
        return 0.0
    user, nice, system, _, _, interrupts, more = map(int, STATISTICS.read_text().split()[1:8])
    own = os.times()
    return (user + nice + system + interrupts + more) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def prepare(console: Console) -> None:
    """One intra-op thread for all, and a word if the machine is busy."""
    torch.set_num_threads(1)
    if (load := os.getloadavg()[0]) > QUIET:
        console.print(f"The machine is busy (load {load:.1f}): these figures are not to be quoted.")


def _turn(pipe: GPipe, case: Case) -> float:
    """Milliseconds of a step; of short ones the median of several."""
    steps: list[float] = []
    while sum(steps) < TURN:
        for parameter in case.model.parameters():
            parameter.grad = None
        begin = time.perf_counter()
        pipe.step(case.input, case.target, case.loss)
        steps.append(1000 * (time.perf_counter() - begin))
    return statistics.median(steps)


def _pipe(case: Case, way: Way) -> GPipe:
    return GPipe(
        case.model,
        list(way.balance),
        devices=["cpu"] * len(way.balance),
        chunks=way.chunks,
        checkpoint=way.checkpoint,
        schedule=way.schedule,
    )
