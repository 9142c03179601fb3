"""A complete training run in a forked process, set up like `gpipe train` but without a command line.

The process is forked after torch was imported, so a run takes moments and a test can kill hundreds of them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.data.loading import batch_count, batches
from gpipe_cli.engines import offload, single, threads
from gpipe_cli.engines.protocol import Batch, Engine, EngineSpec, TrainingObjective
from gpipe_cli.engines.state import EngineState
from gpipe_cli.losses.measures import accuracy
from gpipe_cli.profiling.records import Sample
from gpipe_cli.runs.snapshots import durable, manager
from gpipe_cli.runs.snapshots.contents import Snapshot, open_large_snapshot, open_snapshot
from gpipe_cli.runs.snapshots.manager import Retention, SnapshotManager, save_and_stop
from gpipe_cli.runs.snapshots.manifest import newest_valid_snapshot, rewind_snapshots
from gpipe_cli.training.loop import EvalProgress, EvalResult, Position, TrainFact, TrainSpec, train
from gpipe_cli.training.lr_schedules import Cosine
from gpipe_cli.training.metrics import MetricsFile, metrics_length_at, truncate_metrics
from gpipe_cli.training.signals import StopRequested as StopRequested
from gpipe_cli.training.signals import stop_requests

BATCH = 6
SAMPLES = 22  # the last of four mini-batches is short
STEPS = 10  # two and a half epochs
Spoil = Callable[[Snapshot, EngineState], Snapshot]
"""Replaces part of a snapshot with the same part of an untrained engine's state."""


@final
class Counting(nn.Module):
    """Counts its calls in a non-persistent buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
        return input * (1 + 0.001 * float(self.calls))


@final
class Decaying(torch.optim.SGD):
    """Changes one of its own hyperparameters at every step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["momentum"] *= 0.9
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "decaying": lambda parameters: Decaying(parameters, lr=0.1, momentum=0.9),
}


@final
@dataclass(frozen=True)
class Case:
    """How to train; everything except `balance`, `slices` and `workers` affects the bits."""

    optimizer: str = "adamw"
    clip: float | None = None
    precision: str = "fp32"
    balance: tuple[int, ...] = ()
    """Empty: the engine `single`."""
    slices: int = 0
    """Not 0: the engine `offload`, to disk."""
    workers: int = 0
    every: int | None = 3
    keep: int = 2
    in_place: bool = False
    """Whether states are written without a copy, like large ones."""


@final
class Numbered:
    """Samples whose first feature is their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        chance = torch.Generator().manual_seed(index)
        return torch.cat([torch.tensor([float(index)]), torch.randn(5, generator=chance)]), index % 3


def make_engine(case: Case) -> Engine:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8, momentum=None),
        nn.ReLU(),
        nn.Dropout(0.3),
        Counting(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    )
    loss = nn.functional.cross_entropy
    objective = TrainingObjective(loss, accuracy, OPTIMIZERS[case.optimizer], case.clip, case.precision)
    device = torch.device("cpu")
    balance = list(case.balance) or [len(module)]
    spec = EngineSpec(
        module, objective, balance, [device] * len(balance), chunks=2, eval_chunks=2, schedule="1f1b"
    )
    if case.slices:
        sample = Sample(torch.zeros(BATCH, 6), torch.zeros(BATCH, dtype=torch.int64), loss)
        spec = replace(spec, checkpoint="always", make_sample=lambda: sample)
        return offload.build(spec, to="disk", slices=case.slices)
    return threads.build(spec) if case.balance else single.build(spec)


def warm_up() -> None:
    """Import, once and before any fork, what torch imports lazily in a first step."""
    make_engine(Case()).train_step(next(_batches(0, 0, Case()))[0], 0, 0.0)


def run(
    directory: Path,
    case: Case,
    *,
    steps: int = STEPS,
    spoil: Spoil | None = None,
    at_fact: Callable[[int], None] = lambda count: None,
    in_evaluation: Callable[[], None] = lambda: None,
) -> None:
    """Train to the end, resuming from the newest snapshot in the directory if there is one."""
    torch.set_num_threads(1)
    if case.in_place:
        manager.COPIED_BYTES = 0  # a child has its own copy of every module
    directory.mkdir(exist_ok=True)
    engine = make_engine(case)
    newest = newest_valid_snapshot(directory).newest
    opened = open_large_snapshot if case.slices else open_snapshot
    snapshot = None if newest is None else opened(newest)
    if snapshot is not None:
        if spoil is not None:
            fresh = make_engine(case)
            fresh.train_step(next(_batches(0, 0, case))[0], 0, 0.0)  # so that its optimizer has state
            snapshot = spoil(snapshot, fresh.state())
        engine.load_state(snapshot.state)
    start = Position() if snapshot is None else snapshot.record.position
    rewind_snapshots(directory, start.step, None if snapshot is None else snapshot.path)
    rows = directory / "metrics.jsonl"
    truncate_metrics(rows, metrics_length_at(rows, start))
    spec = TrainSpec(steps, batch_count(SAMPLES, BATCH), lr=0.1, lr_schedule=Cosine(), seed=5)
    sample_numbers: list[list[float]] = []

    def train_batches(epoch: int, first: int) -> Iterator[Batch]:
        for batch, numbers in _batches(epoch, first, case):
            sample_numbers.append(numbers)
            yield batch

    record = None if snapshot is None else snapshot.record
    with (
        stop_requests() as stops,
        MetricsFile(directory / "metrics.jsonl") as metrics,
        SnapshotManager(
            directory, engine, spec, Retention(case.every, case.keep, "loss"), record
        ) as snapshots,
    ):

        def held_out(epoch: int) -> Iterator[Batch]:
            for batch, _ in _batches(0, 0, case):
                yield batch
                in_evaluation()

        facts = train(engine, spec, train_batches, lambda epoch: stops.until_stopped(held_out(epoch)), start)
        events = save_and_stop(facts, spec, snapshots, stops)
        for count, fact in enumerate(event for event in events if not isinstance(event, EvalProgress)):
            metrics.write(_row(fact, sample_numbers))
            at_fact(count)
    engine.close()


def _batches(epoch: int, first: int, case: Case) -> Iterator[tuple[Batch, list[float]]]:
    samples = batches(
        Numbered(), batch_size=BATCH, seed=5, epoch=epoch, start=first, shuffle=True, workers=case.workers
    )
    for input, target in samples:
        yield (input, target), input[:, 0].tolist()


def _row(fact: TrainFact, sample_numbers: list[list[float]]) -> dict[str, Any]:
    kind = "eval" if isinstance(fact, EvalResult) else "train"
    samples = sample_numbers[-1] if kind == "train" else []
    return {
        "step": fact.step,
        "split": kind,
        "loss": repr(fact.loss),
        "means": fact.means,
        "samples": samples,
    }


def result(directory: Path) -> dict[str, Any]:
    """Everything that must not depend on how often a run was killed: bytes of the tensors, record, rows."""
    snapshots = newest_valid_snapshot(directory)
    assert snapshots.newest is not None and not snapshots.damaged
    record: dict[str, Any] = dict(snapshots.newest.manifest.record)
    del record["seconds"]
    record["evaluation"] = {
        key: value for key, value in record["evaluation"].items() if key not in ("took", "seconds")
    }
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        "files": {name: bytes(content) for name, content in snapshots.newest.contents.items()},
        "record": record,
        "rows": rows,
    }


def in_a_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; return its exit code, or the negative number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - a child must never return into the tests of its parent
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(count: int) -> Callable[[int], None]:
    """Kill the process once `count` facts have been recorded."""

    def at_fact(now: int) -> None:
        if now == count:
            for thread in threading.enumerate():  # another test kills the process during a save
                if thread.name == "gpipe-snapshot":
                    thread.join()
            os.kill(os.getpid(), signal.SIGKILL)

    return at_fact


@final
class DeadlyDisk:
    """A stand-in for `os` that kills the process at the n-th call that changes the disk.

    A fatal write first writes half of its data. Calls count only once `begins` exists, if it is given.
    """

    def __init__(
        self,
        deadly: int,
        kinds: tuple[str, ...] = ("write", "fsync", "rename", "mkdir"),
        begins: Path | None = None,
    ) -> None:
        self._left, self._kinds, self._begins = deadly, kinds, begins

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in self._kinds:
            return call

        def counted(*arguments: Any, **places: Any) -> Any:
            self._left -= self._begins is None or self._begins.exists()
            if self._left < 0:
                if name == "write":
                    call(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **places)

        return counted


def with_deadly_disk(directory: Path, case: Case, deadly: int) -> None:
    durable.os = DeadlyDisk(deadly)  # type: ignore[assignment]  # a child has its own copy of every module
    run(directory, case)


def without(part: str, names: str) -> Spoil:
    """Replace the tensors of a part of the state whose names contain `names` with untrained ones."""

    def spoil(snapshot: Snapshot, fresh: EngineState) -> Snapshot:
        before, new = getattr(snapshot.state, part), getattr(fresh, part)
        spoiled = {name: new[name] if names in name else tensor for name, tensor in before.items()}
        assert any(names in name for name in before), f"{part} has no {names}"
        return replace(snapshot, state=replace(snapshot.state, **{part: spoiled}))

    return spoil


def without_numbers(part: str) -> Spoil:
    def spoil(snapshot: Snapshot, fresh: EngineState) -> Snapshot:
        numbers = {**snapshot.state.numbers, part: fresh.numbers[part]}
        return replace(snapshot, state=replace(snapshot.state, numbers=numbers))

    return spoil


def with_position(**changes: Any) -> Spoil:
    def spoil(snapshot: Snapshot, fresh: EngineState) -> Snapshot:
        position = replace(snapshot.record.position, **changes)
        return replace(snapshot, record=replace(snapshot.record, position=position))

    return spoil


def without_best(snapshot: Snapshot, fresh: EngineState) -> Snapshot:
    return replace(snapshot, record=replace(snapshot.record, best=None))
