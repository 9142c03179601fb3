"""An engine whose steps are seen from outside: it notes when each begins and ends, for whoever watches the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from torch import nn

from gpipe_cli.engines.meeting import Beats
from gpipe_cli.engines.protocol import Batch, Engine, StepFacts
from gpipe_cli.engines.state import EngineState


@final
class BeatingEngine:
    def __init__(self, engine: Engine, beats: Beats, rank: int) -> None:
        self._engine, self._beats, self._rank = engine, beats, rank

    @property
    def module(self) -> nn.Module:
        return self._engine.module

    def train_step(self, batch: Batch, key: int, lr: float) -> StepFacts:
        with self._beat():
            return self._engine.train_step(batch, key, lr)

    def eval_step(self, batch: Batch) -> StepFacts:
        with self._beat():
            return self._engine.eval_step(batch)

    def state(self) -> EngineState:
        return self._engine.state()

    def load_state(self, state: EngineState) -> None:
        self._engine.load_state(state)

    def close(self) -> None:
        self._engine.close()

    @contextmanager
    def _beat(self) -> Iterator[None]:
        self._beats.begin(self._rank)
        try:
            yield
        finally:
            self._beats.end(self._rank)
