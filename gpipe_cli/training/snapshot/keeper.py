"""When to save, and which snapshots to keep.

A state is copied between two steps and written in the background; one that may not fit into memory is written at
once. The newest few stay, and the best one. An old one is removed only after the new one has been read back whole,
and only if its name is one this file gives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, final

import torch

from gpipe_cli.engines.protocol import Engine
from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError, GpipeError, ResourceError, RunError
from gpipe_cli.safe_files import open_directory, writing
from gpipe_cli.training.loop import Evaluated, Fact, Plan, Position
from gpipe_cli.training.snapshot.background import Background
from gpipe_cli.training.snapshot.contents import amend, check_savable, copied, write_snapshot
from gpipe_cli.training.snapshot.durable import retire
from gpipe_cli.training.snapshot.finding import FOLDER, snapshot_path, snapshot_paths
from gpipe_cli.training.snapshot.reading import verify
from gpipe_cli.training.snapshot.record import Best, Record, versions

LESS_IS_BETTER = ("loss", "error", "bits_per_token", "perplexity")
"""What a metric's name ends in whose best value is the smallest; of any other it is the largest."""
SLOW_DISK = 50e6  # bytes per second: what a save may take before one has been measured


@dataclass(frozen=True)
class Retention:
    every: int | None
    """Steps between two snapshots; None: one per epoch."""
    keep: int
    """How many of the newest stay."""
    monitor: str | None
    """The metric whose best evaluation stays too."""


@final
class Keeper:
    """Use it in a `with`: nothing is being written any more after it."""

    def __init__(
        self,
        run: Path,
        engine: Engine,
        plan: Plan,
        retention: Retention,
        resumed: Record | None = None,
        before_saving: Callable[[], None] = lambda: None,
        *,
        writes: bool = True,
    ) -> None:
        """writes: whether this process does; another rank only takes part where the state is gathered."""
        self.position = Position() if resumed is None else resumed.position
        self._run, self._engine, self._plan, self._retention = run, engine, plan, retention
        self._best = None if resumed is None else resumed.best
        self._writes = writes
        self._before_saving = before_saving
        self._background = Background()
        self._saved: Position | None = None
        self._spare: EngineState | None = None
        state = engine.state()
        check_savable(state)
        self.save_seconds = (
            sum(one.nbytes for one in (*state.model.values(), *state.optimizer.values())) / SLOW_DISK
        )
        if writes:
            with writing(run / FOLDER):
                (run / FOLDER).mkdir(exist_ok=True)
                with open_directory(run / FOLDER, run):
                    pass  # it is no link to another run's

    def after(self, fact: Fact) -> None:
        """Take notice of a step or an evaluation, and save if it is time."""
        self._background.check()
        self._check_monitor(fact)
        self.position = self.position.after(fact)
        if self._plan.evaluates_after(fact.step) and not isinstance(fact, Evaluated):
            return  # the evaluation comes first, so that a resumed run need not repeat it
        better = isinstance(fact, Evaluated) and self._is_best(fact)
        if better or self._is_due(fact):
            self._save()

    def save_now(self) -> None:
        """Save the present state, unless that is done, and wait for it."""
        if self._saved != self.position and self.position.step > 0:
            self._save()
        self._background.wait()

    @property
    def finished(self) -> bool:
        return self.position.step == self._plan.steps and self.position.evaluated

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._background.wait()
        elif issubclass(kind, Exception):  # a save that was begun before the failure is still good
            with suppress(GpipeError):  # the first failure is the one to tell
                self._background.wait()
        else:
            self._background.abandon()

    def _is_due(self, fact: Fact) -> bool:
        if fact.step == self._plan.steps:
            return True
        if self._retention.every is None:
            return isinstance(fact, Evaluated)
        return fact.step % self._retention.every == 0

    def _is_best(self, fact: Evaluated) -> bool:
        metric = self._retention.monitor
        if metric is None:
            return False
        value = fact.loss if metric == "loss" else fact.means[metric]
        if self._best is not None and self._best.metric == metric:
            before = self._best.value
            if not (value < before if metric.endswith(LESS_IS_BETTER) else value > before):
                return False
        self._best = Best(metric, value, fact.step)
        return True

    def _check_monitor(self, fact: Fact) -> None:
        known = {"loss", *fact.means}
        if self._retention.monitor not in {None, *known}:
            raise ConfigError(
                f"snapshot.monitor={self._retention.monitor}: is not measured here; one of: {', '.join(sorted(known))}"
            )

    def _save(self) -> None:
        self._background.wait()
        began = time.monotonic()
        self._before_saving()
        path, state = snapshot_path(self._run, self.position.step), self._engine.state()
        self._saved = self.position
        if not self._writes:
            return
        record = self._record(state)
        if os.path.isdir(path) and not path.is_symlink():  # noqa: PTH112 - what it may not look at is not there
            # Only a run resumed from just this snapshot gets here, to add its evaluation: no tensor has moved.
            amend(path, record)
            return
        streamed = state.fetch is not None
        if not streamed:
            state = self._spare = copied(state, self._spare)

        def work(between: Callable[[], None]) -> None:
            write_snapshot(path, state, record, between)
            self.save_seconds = time.monotonic() - began
            self._prune(path, record.best)

        self._background.start(work)
        if streamed:  # from where the next step would change it
            self._background.wait()

    def _record(self, state: EngineState) -> Record:
        return Record(
            self.position,
            self._best,
            self._plan.steps_per_epoch,
            self._plan.seed,
            torch.get_num_threads(),
            versions(),
            state.numbers,
        )

    def _prune(self, newest: Path, best: Best | None) -> None:
        """best: as of the new snapshot; by now training may know a better one that is not on the disk yet."""
        kept = None if best is None else snapshot_path(self._run, best.step)
        old = [path for path in snapshot_paths(self._run)[self._retention.keep :] if path != kept]
        if not old:
            return
        try:
            verify(newest)
            for path in old:
                retire(path, self._run)
        except RunError as error:
            raise ResourceError(f"the snapshot just written reads back otherwise: {error}") from error
        except OSError as error:
            raise ResourceError(f"an old snapshot cannot be removed: {error}") from error
