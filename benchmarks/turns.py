"""Measure several pipeline configurations of one case in one process, in turns.

This compares gpipe with itself; `harness` compares systems, each in processes of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import torch
from rich.console import Console

from benchmarks.cases import Case
from benchmarks.other_load import seconds_of_others, warn_if_busy
from gpipe_cli import GPipe

OTHERS_AT_MOST = 0.06
"""Seconds of CPU time of other processes that are tolerated per second of a turn."""
TRIES = 4
TURN = 400.0
"""Minimum milliseconds per turn."""

Result = TypeVar("Result")


@final
@dataclass(frozen=True)
class PipeConfig:
    """How to partition and schedule a case."""

    balance: tuple[int, ...]
    chunks: int
    schedule: str = "gpipe"
    checkpoint: str = "never"

    def __str__(self) -> str:
        return f"{self.schedule} {self.checkpoint}, {len(self.balance)} partitions"


def milliseconds(
    case: Case,
    configs: Sequence[PipeConfig],
    rounds: int,
    before_turn: Callable[[PipeConfig], None] = lambda config: None,
) -> Mapping[PipeConfig, list[float]]:
    """Milliseconds of a step of each configuration in each round.

    Two warm-up rounds come first; `before_turn` is called before every measured turn."""
    times: dict[PipeConfig, list[float]] = {config: [] for config in configs}
    with ExitStack() as stack:
        pipes = {config: stack.enter_context(_pipe(case, config)) for config in configs}
        for number in range(-2, rounds):
            for config, pipe in pipes.items():
                if number >= 0:
                    before_turn(config)
                taken = undisturbed(partial(_turn, pipe, case))
                if number >= 0:
                    times[config].append(taken)
    for parameter in case.model.parameters():
        parameter.grad = None
    return times


def undisturbed(turn: Callable[[], Result]) -> Result:
    """Run a turn and return its result; repeat it, up to `TRIES` times, if others used the machine."""
    for _ in range(TRIES):
        others, begin = seconds_of_others(), time.perf_counter()
        result = turn()
        if seconds_of_others() - others < OTHERS_AT_MOST * (time.perf_counter() - begin):
            break
    return result


def prepare(console: Console) -> None:
    """Use one intra-op thread, and warn if the machine is busy."""
    torch.set_num_threads(1)
    warn_if_busy(console)


def _turn(pipe: GPipe, case: Case) -> float:
    """Milliseconds of a step: the median of as many steps as fill a turn."""
    steps: list[float] = []
    while sum(steps) < TURN:
        for parameter in case.model.parameters():
            parameter.grad = None
        begin = time.perf_counter()
        pipe.step(case.input, case.target, case.loss)
        steps.append(1000 * (time.perf_counter() - begin))
    return statistics.median(steps)


def _pipe(case: Case, config: PipeConfig) -> GPipe:
    return GPipe(
        case.model,
        list(config.balance),
        devices=["cpu"] * len(config.balance),
        chunks=config.chunks,
        checkpoint=config.checkpoint,
        schedule=config.schedule,
    )
