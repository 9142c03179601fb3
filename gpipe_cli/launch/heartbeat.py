"""Heartbeats: each rank notes when it enters and leaves a step, in memory that the launcher can read."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:  # the launcher reads heartbeats before it has any use for torch
    from torch import Tensor, nn

    from gpipe_cli.engines.protocol import Batch, BatchResult, Engine
    from gpipe_cli.engines.state import EngineState
    from gpipe_cli.pytree import ModelInput

NOT_IN_STEP = 0.0


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
