"""What becomes of the facts of a run on a rank that does not speak: lines of logs/rank-N.log, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.config.schema import LogConfig
from gpipe_cli.report.output import write_streams_to
from gpipe_cli.run.logs import run_log
from gpipe_cli.safe_files import writing
from gpipe_cli.training.line_file import LineFile
from gpipe_cli.training.loop import Evaluated, Fact, Position

FOLDER = "logs"


@final
@dataclass(frozen=True)
class Follower:
    """The `Journal` of such a rank."""

    log: logging.Logger
    every: int
    start: Position

    @staticmethod
    @contextmanager
    def open(directory: Path, rank: int, settings: LogConfig, start: Position) -> Iterator[Follower]:
        path = directory / FOLDER / f"rank-{rank}.log"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            write_streams_to(path, directory)
        with (
            closing(LineFile(path, directory)) as file,
            run_log(file, partitions=settings.partitions, layers=settings.layers) as log,
        ):
            yield Follower(log, settings.every, start)

    def say(self, line: str) -> None:
        self.log.info("%s", line)

    def sync(self) -> None:
        """There is nothing that must be on disk before a snapshot is."""

    def follow(self, facts: Iterable[Fact]) -> Evaluated:
        last = self.start.evaluation
        for fact in facts:
            if isinstance(fact, Evaluated):
                last = fact
                self.log.info("step %d | eval loss %.6g", fact.step, fact.loss)
            elif fact.step % self.every == 0:
                self.log.info("step %d | loss %.6g | lr %.3g", fact.step, fact.loss, fact.lr)
        assert last is not None, "training ends with an evaluation"
        return last
