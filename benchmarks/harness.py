"""Run systems on a case in turns and return their measurements.

All systems are ready before the first is measured. In each round every system takes one turn, so that whatever slows
the machine down slows all of them; compare ratios within a round. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import final

from benchmarks import subject
from benchmarks.subject import Failed

TURN = 0.2
"""Minimum seconds per turn: a turn repeats short steps, or the measurement would be mostly start-up."""


@final
@dataclass(frozen=True)
class Candidate:
    system: str
    threads: int = 1
    """Intra-op threads of each thread that computes."""
    processes: int = 1
    checkout: Path | None = None
    """The folder whose gpipe_cli to measure; None: the installed package."""


@final
@dataclass
class SystemResult:
    """Measurements of one system. `seconds` per step has an entry per round, from its slowest process."""

    system: str
    seconds: list[float] = field(default_factory=list)
    squared_norm: float = 0.0
    memory: float = 0.0
    memory_before: float = 0.0
    failure: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


def ratio(result: SystemResult, baseline: SystemResult) -> float:
    """The median over all rounds of the time of `result` divided by that of `baseline` in the same round."""
    return statistics.median(a / b for a, b in zip(result.seconds, baseline.seconds, strict=True))


@final
@dataclass(frozen=True)
class Ratio:
    """The median and quartiles, over all rounds, of the ratio of two times of the same round."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(times: Sequence[float], base_times: Sequence[float]) -> Ratio:
        ratios = [time / base for time, base in zip(times, base_times, strict=True)]
        return Ratio(*statistics.quantiles(ratios, n=4, method="inclusive"))


@final
class _SystemProcesses:
    """The processes of one system."""

    def __init__(self, candidate: Candidate, case: str, rendezvous_file: Path) -> None:
        self.result = SystemResult(candidate.system)
        self._steps = 1
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        # For the processes started below; torch.set_num_threads does not reach oneDNN in a peer's threads.
        os.environ["OMP_NUM_THREADS"] = str(candidate.threads)
        context = multiprocessing.get_context("spawn")
        for rank in range(candidate.processes):
            parent_end, child_end = context.Pipe()
            checkout = None if candidate.checkout is None else str(candidate.checkout)
            arguments = (child_end, candidate.system, case, rank, str(rendezvous_file), checkout)
            process = context.Process(target=subject.main, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self._connections.append(parent_end)
            self._processes.append(process)

    def ask(self, command: str | int) -> list[float]:
        if self.result.failure is not None:
            return []
        for connection in self._connections:
            connection.send(command)
        return self.answers()

    def answers(self) -> list[float]:
        """One number per process; empty if any of them failed."""
        replies = [_receive(connection) for connection in self._connections]
        failures = [reply.text for reply in replies if isinstance(reply, Failed)]
        if failures:
            self.result.failure = failures[0]
            return []
        return [reply for reply in replies if not isinstance(reply, Failed)]

    def warm_up(self) -> None:
        """Run two steps: the first may allocate or compile; the second decides how many steps fill a turn."""
        for _ in range(2):
            for seconds in self._slowest(1):
                self._steps = max(1, round(TURN / seconds))

    def run(self) -> None:
        self.result.seconds += self._slowest(self._steps)

    def collect_facts(self) -> None:
        self.result.squared_norm = sum(self.ask("squared_norm"))
        self.result.memory = sum(self.ask("memory"))
        self.result.memory_before = sum(self.ask("memory_before"))

    def _slowest(self, steps: int) -> list[float]:
        return [max(answers)] if (answers := self.ask(steps)) else []

    def end(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            with contextlib.suppress(OSError):  # the process may already have ended
                connection.send("stop")
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def measure(
    case: str,
    candidates: Sequence[Candidate],
    rounds: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[SystemResult]:
    """Measure all candidates. A system that fails is returned with its failure and takes no more turns."""
    with _start(case, candidates, progress) as systems:
        for system in systems:
            system.warm_up()
        for number in range(rounds):
            progress(f"{case}: round {number + 1} of {rounds}")
            # Alternate the direction, because what runs before a turn affects it.
            for system in systems if number % 2 == 0 else reversed(systems):
                system.run()
        for system in systems:
            system.collect_facts()
        return [system.result for system in systems]


@contextlib.contextmanager
def _start(
    case: str, candidates: Sequence[Candidate], progress: Callable[[str], None]
) -> Iterator[list[_SystemProcesses]]:
    systems: list[_SystemProcesses] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, candidate in enumerate(candidates):
                progress(f"{case}: prepare {candidate.system}")
                system = _SystemProcesses(candidate, case, Path(folder, str(number)))
                systems.append(system)
                system.answers()
            yield systems
        finally:
            for system in systems:
                system.end()


def _receive(connection: Connection) -> float | Failed:
    try:
        reply: float | Failed = connection.recv()
    except EOFError:
        return Failed("the process ended without a reply")
    return reply
