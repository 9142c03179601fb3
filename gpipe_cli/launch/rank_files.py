"""The files through which a launcher and its ranks communicate: task, rendezvous store, exit reports, heartbeats.

Files instead of sockets: no port is opened, and nobody else can read the folder. Everything read back is JSON or text,
but for the heartbeats: all processes map their file, and each rank notes in it when it enters and leaves a step.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from gpipe_cli.errors import INTERRUPTED, Stopped

if TYPE_CHECKING:  # the launcher reads heartbeats before it has any use for torch
    from torch import Tensor, nn

    from gpipe_cli.engines.protocol import Batch, BatchResult, Engine
    from gpipe_cli.engines.state import EngineState
    from gpipe_cli.pytree import ModelInput

NOT_IN_STEP = 0.0


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
    balance: list[int]
    config: str = ""
    """The composed configuration as YAML."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """What else the launcher knows of the job: the fields of `Job` that JSON can hold."""
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


@final
class Heartbeats:
    """The time at which each rank entered its current step, in a file that all processes map."""

    def __init__(self, path: Path, ranks: int) -> None:
        """The first process creates the file; the others open it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, 8 * ranks)
            # Each rank writes one aligned 8-byte double of its own, so readers need no lock.
            self._step_began = memoryview(mmap.mmap(descriptor, 8 * ranks)).cast("d")
        finally:
            os.close(descriptor)

    @contextmanager
    def in_step(self, rank: int) -> Iterator[None]:
        """Mark `rank` as being in a step while the block runs."""
        self._step_began[rank] = time.monotonic()
        try:
            yield
        finally:
            self._step_began[rank] = NOT_IN_STEP

    @contextmanager
    def outside_step(self, rank: int) -> Iterator[None]:
        """Mark `rank` as not being in a step while the block runs; the time of a step that it is in starts again."""
        in_step = self._step_began[rank] != NOT_IN_STEP
        self._step_began[rank] = NOT_IN_STEP
        try:
            yield
        finally:
            self._step_began[rank] = time.monotonic() if in_step else NOT_IN_STEP

    def read(self) -> list[float]:
        """For each rank the monotonic time at which its step began, or NOT_IN_STEP."""
        return [float(began) for began in self._step_began]


@final
class HeartbeatEngine:
    """An engine that sends a heartbeat around every step of the engine it wraps."""

    def __init__(self, engine: Engine, heartbeats: Heartbeats, rank: int) -> None:
        self._engine, self._heartbeats, self._rank = engine, heartbeats, rank

    @property
    def module(self) -> nn.Module:
        return self._engine.module

    def train_step(self, batch: Batch, key: int, lr: float, *, measure: bool = True) -> BatchResult:
        with self._heartbeats.in_step(self._rank):
            return self._engine.train_step(batch, key, lr, measure=measure)

    def eval_step(self, batch: Batch) -> BatchResult:
        with self._heartbeats.in_step(self._rank):
            return self._engine.eval_step(batch)

    def predict(self, input: ModelInput, choose: Callable[[Any], Tensor]) -> Tensor:
        with self._heartbeats.in_step(self._rank):
            return self._engine.predict(input, choose)

    def state(self) -> EngineState:
        return self._engine.state()

    def before_update(self, wait: Callable[[], None]) -> None:
        def wait_outside_step() -> None:
            # Writing a large snapshot may well take longer than step_timeout.
            with self._heartbeats.outside_step(self._rank):
                wait()

        self._engine.before_update(wait_outside_step)

    def peak_bytes(self) -> list[int | None]:
        return self._engine.peak_bytes()

    def load_state(self, state: EngineState) -> None:
        self._engine.load_state(state)

    def close(self) -> None:
        self._engine.close()
