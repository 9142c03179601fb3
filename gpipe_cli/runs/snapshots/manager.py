"""When to save a snapshot and which ones to keep; saving between steps, and on a request to stop."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, final

import torch

from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError, GpipeError, ResourceError, RunError
from gpipe_cli.runs.snapshots.contents import check_savable, copy_buffers, copy_state, write_snapshot
from gpipe_cli.runs.snapshots.durable import remove_atomically
from gpipe_cli.runs.snapshots.manifest import (
    SNAPSHOTS,
    read_snapshot,
    snapshot_path,
    snapshot_paths,
    verify_part,
)
from gpipe_cli.runs.snapshots.record import BaseFiles, BestEvaluation, TrainingRecord, versions
from gpipe_cli.safe_files import open_directory, writing
from gpipe_cli.training.loop import EvalProgress, EvalResult, Position, TrainEvent, TrainFact, TrainSpec
from gpipe_cli.training.signals import StopRequested, StopRequests
from gpipe_cli.values import format_bytes, lower_is_better

COPIED_BYTES = 256 * 2**20
"""A process copies a state up to this size before it is written."""
SLOW_DISK = 50e6
"""Bytes per second, for the duration of a save before one was measured."""
TIME_MARGIN = 1.5
"""The next step or save may take this much longer than the longest one measured."""


@final
@dataclass(frozen=True)
class Retention:
    every: int | None
    """Steps between two snapshots; None: one per epoch."""
    keep: int
    """How many of the newest snapshots to keep."""
    monitor: str | None
    """The metric whose best evaluation is kept as well."""
    finished: int | None = None
    """How many of the newest to keep of a finished run; None: as many as before."""

    def max_snapshots(self, spec: TrainSpec) -> int:
        """How many snapshots the disk holds at most: those kept, the best one, and the one being written."""
        saves = spec.epochs if self.every is None else -(-spec.steps // self.every)
        if (self.every or spec.eval_every) is not None and self.monitor is not None:
            saves += spec.evaluations  # every evaluation may be the best one yet
        return min(saves, self.keep + (self.monitor is not None) + 1)

    def is_better(self, value: float, best: float) -> bool:
        assert self.monitor is not None, "there is a metric to compare"
        return value < best if lower_is_better(self.monitor) else value > best


def monitor_error(monitor: str | None, measured: Iterable[str]) -> ConfigError:
    names = ", ".join(sorted(measured))
    return ConfigError(f"snapshot.monitor={monitor}: this run does not measure it; choose one of: {names}")


def check_snapshot_space(run: Path, spec: TrainSpec, retention: Retention, size: int) -> str | None:
    """Raise if the disk has no room for one snapshot of `size` bytes; return a warning if not all will fit.

    run: the run directory, which need not exist yet.
    """
    try:
        existing = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
    except OSError:  # a file system that does not report its free space: the first write will show
        return None
    # The space of the snapshots that a resumed run already has is no longer among what is free.
    planned = retention.max_snapshots(spec) - len(snapshot_paths(run))
    if planned > 0 and free < size:
        raise ResourceError(
            f"{run}: no room for a snapshot: it needs about {size:,} bytes, {free:,} are free; "
            "make room, or choose a run_dir on another disk"
        )
    if free < planned * size:
        return (
            f"warning: {run}: the run will keep {planned} snapshots of about {format_bytes(size)}, but only "
            f"{free // size} fit into the {format_bytes(free)} that are free; make room, or lower "
            f"snapshot.keep={retention.keep}"
        )
    return None


def save_and_stop(
    events: Generator[TrainEvent, None, None],
    spec: TrainSpec,
    snapshots: SnapshotManager,
    stops: StopRequests,
) -> Iterator[TrainEvent]:
    """Pass the events of the loop on, save between them, and stop early, or on a request after a last snapshot.

    The consumer writes each fact to metrics.jsonl before it asks for the next one, so a snapshot, which is saved when
    it does, never knows a row that the file lacks. On a request to stop this raises StopRequested.
    """
    longest = 0.0
    last = time.monotonic()
    try:
        for fact in events:
            yield fact
            if isinstance(fact, EvalProgress):
                continue  # the batches of an evaluation look for requests to stop themselves
            if isinstance(fact, EvalResult) and (early := spec.early_stop) is not None:
                snapshots.patience = early.after(fact.value(early.metric), fact.step, snapshots.patience)
            snapshots.after(fact)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            # The next look at the deadline is a step away, and a clean stop then still has to save.
            stops.reserve = TIME_MARGIN * (snapshots.save_seconds + longest)
            # A run that has just finished ends normally. All ranks know the same, so they skip the collective together.
            if spec.is_done(snapshots.position, snapshots.patience):
                break
            if request := stops.agreed():
                raise request
        snapshots.save_now()
        snapshots.remove_unneeded()
    except StopRequested:  # from here, or from the batches of an evaluation that was under way
        snapshots.save_now()
        raise
    finally:
        events.close()


@final
class SnapshotManager:
    """Saves the engine's state and keeps the newest snapshots and the best one. Leaving its `with` waits for a save.

    A background thread writes the state; of several ranks, each writes its own part. A small state is copied between
    two steps. The tensors of a larger one are written as they are: the next step may run forward and backward
    meanwhile, but its update waits, so that a save never takes more memory than COPIED_BYTES. An old snapshot is
    removed only after the new one has been read back whole.
    """

    def __init__(
        self,
        run: Path,
        engine: Engine,
        spec: TrainSpec,
        retention: Retention,
        resumed: TrainingRecord | None = None,
        before_saving: Callable[[], None] = lambda: None,
        *,
        base_files: Callable[[], BaseFiles] | None = None,
        world: World = World(),  # noqa: B008 - immutable
    ) -> None:
        """base_files: returns the files that hold what the engine's state leaves out; only the writing thread calls it.
        world: the ranks that write, with collectives for the writing thread.
        """
        self.position = Position() if resumed is None else resumed.position
        self._run, self._engine, self._spec, self._retention = run, engine, spec, retention
        self._best = None if resumed is None else resumed.best
        self.patience = None if resumed is None else resumed.patience
        """How long early stopping has waited; saved with the next snapshot."""
        self._world = world
        self._base_files: BaseFiles | None = None
        self._before_saving = before_saving
        self._writer = _BackgroundWriter()
        self._saved: Position | None = None
        self._copy: EngineState | None = None
        self._in_place = False
        engine.before_update(self._finish_in_place)
        state = engine.state()
        check_savable(state)
        self.save_seconds = state.nbytes * world.size / SLOW_DISK
        if world.is_rank_zero:
            with writing(run / SNAPSHOTS):
                (run / SNAPSHOTS).mkdir(exist_ok=True)
                with open_directory(run / SNAPSHOTS, run):
                    pass  # raises if it is a link, for example to the snapshots of another run
            if base_files is not None:
                # Hashing a large base model takes a while. So do it beside the first steps, not when the first
                # snapshot is due, which may be the last before a time limit.
                self._writer.start(lambda on_chunk: self._remember(base_files()))

    def _remember(self, base_files: BaseFiles) -> None:
        self._base_files = base_files

    def after(self, fact: TrainFact) -> None:
        """Save if it is time to, after a step or an evaluation."""
        # A write that failed in the background ends the run now, not at the next save.
        self._writer.check()
        metrics = {"loss", *fact.means}
        is_measured = isinstance(fact, EvalResult) or fact.measured
        if is_measured and self._retention.monitor not in {None, *metrics}:
            raise monitor_error(self._retention.monitor, metrics)
        self.position = self.position.after(fact)
        if self._spec.evaluates_after(fact.step) and not isinstance(fact, EvalResult):
            return  # save after the evaluation, so that a resumed run need not repeat it
        best = isinstance(fact, EvalResult) and self._update_best(fact)
        every = self._retention.every
        due = self._spec.ends_epoch(fact.step) if every is None else fact.step % every == 0
        if best or due or fact.step == self._spec.steps:
            self._save()

    def save_now(self) -> None:
        """Save the present state, unless it is saved already, and wait until it is on the disk."""
        if self._saved != self.position and self.position.step > 0:
            self._save()
        self._writer.wait()

    def remove_unneeded(self) -> None:
        """Remove, once the run has finished, what only a run that may still crash needs."""
        path, best, keep = snapshot_path(self._run, self.position.step), self._best, self._retention.finished
        if keep is not None:
            self._writer.start(lambda on_chunk: self._remove_old(path, best, keep))
            self._writer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._writer.wait()
        elif issubclass(kind, Exception):  # a save that began before the failure is still good
            try:
                self._writer.wait()
            except Exception as failure:  # noqa: BLE001 - the failure under way is the one to report
                # Of several ranks, the one that could not write is gone, and that is all the others know.
                if error is not None and self._world.size > 1 and not isinstance(error, GpipeError):
                    error.add_note(str(failure))
        else:  # a second Ctrl-C: end now; the writers of other ranks may keep this one waiting
            self._writer.abandon(wait=self._world.size == 1)

    def _update_best(self, fact: EvalResult) -> bool:
        metric = self._retention.monitor
        if metric is None:
            return False
        value, best = fact.value(metric), self._best
        if best is not None and best.metric == metric and not self._retention.is_better(value, best.value):
            return False
        self._best = BestEvaluation(metric, value, fact.step)
        return True

    def _save(self) -> None:
        # The copy below goes into the memory that a write under way still reads.
        self._writer.wait()
        began = time.monotonic()
        # Puts metrics.jsonl on the disk: no snapshot may count rows that a power cut can still lose.
        self._before_saving()
        path, state = snapshot_path(self._run, self.position.step), self._engine.state()
        self._saved = self.position
        record = TrainingRecord(
            self.position,
            self._best,
            self._spec.steps_per_epoch,
            self._spec.seed,
            torch.get_num_threads(),
            versions(),
            state.numbers,
            self._base_files,
            self.patience,
        )
        state = self._until_written(state)

        def write(on_chunk: Callable[[], None]) -> None:
            write_snapshot(path, state, record, on_chunk, self._world)
            self.save_seconds = time.monotonic() - began
            self._remove_old(path, record.best, self._retention.keep)

        self._writer.start(write)
        if state.fetch is not None:  # it reads tensors that even an evaluation moves
            self._writer.wait()

    def _until_written(self, state: EngineState) -> EngineState:
        """The state as it is now, for the writing thread."""
        # All ranks do the same: one that waits in its step for its writer would keep the others waiting in theirs.
        self._in_place = self._world.max(state.nbytes) > COPIED_BYTES
        if state.fetch is not None:
            return state
        if self._in_place:
            self._copy = None
            return copy_buffers(state, self._engine.module)
        self._copy = copy_state(state, self._copy)
        return self._copy

    def _finish_in_place(self) -> None:
        """Called before an update: the writer reads the very tensors that it changes."""
        if self._in_place:
            self._writer.wait()
            self._in_place = False

    def _remove_old(self, newest: Path, best: BestEvaluation | None, keep: int) -> None:
        """best: as of `newest`; by now training may know a better evaluation whose snapshot is not written yet."""
        best_path = None if best is None else snapshot_path(self._run, best.step)
        old: list[Path] = []
        if (
            self._world.is_rank_zero
        ):  # it decides for all: what others see of a shared file system may be a moment old
            old = [path for path in snapshot_paths(self._run)[keep:] if path != best_path]
        if not self._world.run_together(lambda: bool(old))[0]:
            return
        self._world.run_together(lambda: self._verify_own(newest))
        self._world.run_together(lambda: self._remove(old))

    def _verify_own(self, newest: Path) -> None:
        try:
            verify_part(read_snapshot(newest, verify=False), self._world.rank, self._world.size)
        except RunError as error:
            raise ResourceError(f"the new snapshot does not read back as written: {error}") from error

    def _remove(self, old: Sequence[Path]) -> None:
        try:
            for path in old:
                remove_atomically(path, self._run)
        except OSError as error:
            raise ResourceError(f"an old snapshot cannot be removed: {error}") from error


class WriteAbandoned(BaseException):
    """Raised inside a write that is no longer wanted; not an Exception, which writers report to the other ranks."""


@final
class _BackgroundWriter:
    """Runs one write at a time in a thread. The training thread raises its failure at the next call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        # Set by the background thread before `_ended`, so `wait` always sees it; `check` may see it a moment later.
        self._failure: BaseException | None = None
        self._abandoned = threading.Event()
        self._ended = threading.Event()

    def start(self, write: Callable[[Callable[[], None]], None]) -> None:
        """Run `write` once the previous write has ended; it calls its argument between chunks."""
        self.wait()
        self._ended.clear()
        # A daemon: the interpreter does not wait for it when a second Ctrl-C ends the process.
        self._thread = threading.Thread(target=self._run, args=(write,), name="gpipe-snapshot", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the failure of the last write, if it failed."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait until the write has ended, then `check`."""
        self._join()
        self.check()

    def abandon(self, *, wait: bool) -> None:
        """End the write at its next chunk, and ignore how it ended; wait: until it has ended."""
        self._abandoned.set()
        if wait:
            self._join()
            self._failure = None

    def _join(self) -> None:
        if self._thread is not None:
            # A join that a signal interrupts leaves the thread marked as ended though it still runs, so a later join
            # would return at once. Wait for the event first.
            self._ended.wait()
            self._thread.join()
            self._thread = None

    def _run(self, write: Callable[[Callable[[], None]], None]) -> None:
        try:
            write(self._check_abandoned)
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self._failure = error
        finally:
            self._ended.set()

    def _check_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise WriteAbandoned
