"""The files through which a launcher and its ranks communicate: the task, the rendezvous store, exit reports.

Files instead of sockets: no port is opened, and nobody else can read the folder. Everything read back is JSON or text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import INTERRUPTED, Stopped


@final
@dataclass(frozen=True)
class ExitReport:
    """How a rank ended; it writes this just before it exits."""

    exit_code: int
    message: str = ""
    caused_by_peer: bool = False
    """The rank ended because another rank died or did not answer."""
    time: float = 0.0
    """By the monotonic clock, which all processes of a machine share."""
    summary: Mapping[str, Any] | None = None
    """The result of the command; rank 0 only."""

    @property
    def is_clean(self) -> bool:
        """Whether the rank finished, or stopped because it was asked to."""
        return self.exit_code in (0, Stopped.exit_code, INTERRUPTED)


@final
@dataclass(frozen=True)
class RankTask:
    """What every rank is to run: one job, as its launcher composed and balanced it."""

    command: str
    overrides: list[str]
    line: str
    """The command line that repeats the job."""
    config: str
    """The composed configuration as YAML."""
    model: str
    in_sweep: bool
    """Whether it is one of several jobs, whose results are printed together."""
    balance: list[int]
    began: float
    """When the command began, by the monotonic clock; its time limit counts from there."""
    json: bool = False
    """Whether the result is printed as JSON."""
    order: str = ""
    """The order of schedule=auto or schedule=file, as a CSV file has it; empty with another schedule."""
    run_directory: str | None = None
    """The directory to resume in, after a failed attempt."""


@final
@dataclass(frozen=True)
class RankFiles:
    folder: Path

    @property
    def store(self) -> Path:
        """The file of the `torch.distributed.FileStore` through which the ranks of a launcher meet."""
        return self.folder / "store"

    @property
    def heartbeats(self) -> Path:
        return self.folder / "heartbeats"

    def output(self, rank: int) -> Path:
        """Where a rank other than 0 writes its streams until it has a log in the run directory."""
        return self.folder / f"rank-{rank}.txt"

    def write_task(self, task: RankTask) -> None:
        self._write("task.json", json.dumps(asdict(task)))

    def read_task(self) -> RankTask:
        text = self._read("task.json")
        assert text is not None, "a launcher writes it before it starts a rank"
        return RankTask(**json.loads(text))

    def write_exit_report(self, rank: int, report: ExitReport) -> None:
        self._write(f"rank-{rank}.json", json.dumps(asdict(report)))

    def read_exit_report(self, rank: int) -> ExitReport | None:
        """None for a rank that was killed before it could write one."""
        text = self._read(f"rank-{rank}.json")
        return None if text is None else ExitReport(**json.loads(text))

    def write_run_directory(self, directory: Path) -> None:
        """Record the run directory, so that a restart resumes in it."""
        self._write("run", str(directory))

    def read_run_directory(self) -> Path | None:
        text = self._read("run")
        return None if text is None else Path(text)

    def write_descriptions(self, descriptions: Sequence[str]) -> None:
        """Record which part of the model each rank holds, for messages."""
        self._write("descriptions.json", json.dumps(descriptions))

    def read_descriptions(self) -> list[str]:
        """Empty before the ranks know."""
        return list(json.loads(self._read("descriptions.json") or "[]"))

    def _write(self, name: str, text: str) -> None:
        # By a name of its own process: all ranks of a launcher record the same run directory.
        temporary = self.folder / f"{name}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(self.folder / name)  # atomic: another process may read at any moment

    def _read(self, name: str) -> str | None:
        """None before anybody has written it."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
