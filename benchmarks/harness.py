"""Runs systems on a case, taking turns, and gives what was measured.

All systems are ready before the first is measured. In each round every system runs one step, so that whatever
slows the machine down slows all of them; to compare are ratios within a round. Knows nothing of torch.
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
"""Seconds a turn lasts at least: short steps are run several times, or starting would be all one measures."""


@final
@dataclass(frozen=True)
class Contestant:
    system: str
    threads: int = 1
    """Intra-op threads of each process, in whichever of its own threads it computes."""
    processes: int = 1
    checkout: Path | None = None
    """The folder whose gpipe_cli is measured; None: the one that is installed."""


@final
@dataclass
class Measured:
    """What one system did. `seconds` per step: one entry for each round, of the slowest of its processes."""

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


def ratio(one: Measured, other: Measured) -> float:
    """The median over rounds of how long one took, as a multiple of the other in the same round."""
    return statistics.median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


@final
@dataclass(frozen=True)
class Ratio:
    """Of one time to another in the same round, over all rounds: the median and the quartiles around it."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(times: Sequence[float], to: Sequence[float]) -> Ratio:
        ratios = [one / other for one, other in zip(times, to, strict=True)]
        return Ratio(*statistics.quantiles(ratios, n=4, method="inclusive"))


@final
class _Team:
    """The processes of one system."""

    def __init__(self, contestant: Contestant, case: str, meeting_file: Path) -> None:
        self.measured = Measured(contestant.system)
        self._steps = 1
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        # For the processes started below; torch.set_num_threads does not reach oneDNN in a peer's threads.
        os.environ["OMP_NUM_THREADS"] = str(contestant.threads)
        context = multiprocessing.get_context("spawn")
        for rank in range(contestant.processes):
            here, there = context.Pipe()
            checkout = None if contestant.checkout is None else str(contestant.checkout)
            arguments = (there, contestant.system, case, rank, str(meeting_file), checkout)
            process = context.Process(target=subject.main, args=arguments, daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def ask(self, command: str | int) -> list[float]:
        if self.measured.failure is not None:
            return []
        for connection in self._connections:
            connection.send(command)
        return self.answers()

    def answers(self) -> list[float]:
        """One number per process; empty if any of them failed."""
        replies = [_receive(connection) for connection in self._connections]
        failures = [reply.text for reply in replies if isinstance(reply, Failed)]
        if failures:
            self.measured.failure = failures[0]
            return []
        return [reply for reply in replies if not isinstance(reply, Failed)]

    def warm_up(self) -> None:
        """Twice, as the first step may do what no other does; the second tells how many make up a turn."""
        for _ in range(2):
            for seconds in self._slowest(1):
                self._steps = max(1, round(TURN / seconds))

    def run(self) -> None:
        self.measured.seconds += self._slowest(self._steps)

    def tell_facts(self) -> None:
        self.measured.squared_norm = sum(self.ask("squared_norm"))
        self.measured.memory = sum(self.ask("memory"))
        self.measured.memory_before = sum(self.ask("memory_before"))

    def _slowest(self, steps: int) -> list[float]:
        return [max(answers)] if (answers := self.ask(steps)) else []

    def end(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            with contextlib.suppress(OSError):  # it may have ended by itself
                connection.send("stop")
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def measure(
    case: str,
    contestants: Sequence[Contestant],
    rounds: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """A system that fails is in the result with its failure, and takes no further part."""
    with _teams(case, contestants, progress) as teams:
        for team in teams:
            team.warm_up()
        for number in range(rounds):
            progress(f"{case}: round {number + 1} of {rounds}")
            # Forth and back, since what runs before a turn is felt in it.
            for team in teams if number % 2 == 0 else reversed(teams):
                team.run()
        for team in teams:
            team.tell_facts()
        return [team.measured for team in teams]


@contextlib.contextmanager
def _teams(
    case: str, contestants: Sequence[Contestant], progress: Callable[[str], None]
) -> Iterator[list[_Team]]:
    teams: list[_Team] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, contestant in enumerate(contestants):
                progress(f"{case}: prepare {contestant.system}")
                team = _Team(contestant, case, Path(folder, str(number)))
                teams.append(team)
                team.answers()
            yield teams
        finally:
            for team in teams:
                team.end()


def _receive(connection: Connection) -> float | Failed:
    try:
        reply: float | Failed = connection.recv()
    except EOFError:
        return Failed("the process ended without a word")
    return reply
