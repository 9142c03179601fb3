"""Ranks that train a little and save snapshots, for tests that compare, damage and resume these."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from gpipe_cli.distributed import get_group, setup_process_groups
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.engines.state import EngineState, parameter_of
from gpipe_cli.runs.snapshots.contents import Snapshot, open_large_snapshot, write_snapshot
from gpipe_cli.runs.snapshots.manager import Retention, SnapshotManager
from gpipe_cli.runs.snapshots.manifest import (
    rewind_snapshots,
    search_together,
    snapshot_path,
    snapshot_paths,
)
from gpipe_cli.runs.snapshots.record import TrainingRecord, versions
from gpipe_cli.tensor_files.tensor_file import TensorFile
from gpipe_cli.training.loop import Position, TrainSpec
from gpipe_cli.training.lr_schedules import Constant
from tests.distributed.cases import Case
from tests.support.step_results import trained

FOREVER = timedelta(hours=1)
SPEC = TrainSpec(steps=4, steps_per_epoch=4, lr=0.1, lr_schedule=Constant(), seed=0)


@dataclass(frozen=True)
class Journey:
    """A case that is trained and saved, then loaded and saved again by other ranks."""

    case: Case
    then: Case
    """How the ranks that load it are arranged."""


def topology(case: Case, ranks: int) -> int:
    """Make the groups of a case; the ranks in a pipe."""
    setup_process_groups([("data", case.replicas), ("pipe", ranks // case.replicas)], timeout=FOREVER)
    return ranks // case.replicas


def record(state: EngineState, step: int) -> TrainingRecord:
    return TrainingRecord(Position(step, 1.0), None, 4, 0, 1, versions(), state.numbers)


def travel(journeys: Sequence[Journey], rank: int, ranks: int, folder: Path) -> None:
    """Save each journey as step 1, load it in the other arrangement, and save it again as step 2."""
    world = World.current().for_thread(FOREVER)
    for number, journey in enumerate(journeys):
        run, case = folder / str(number), journey.case
        if rank == 0:
            (run / "snapshots").mkdir(parents=True)
        engine = case.on_ranks(topology(case, ranks))
        replica = distributed.get_rank(get_group("data"))
        for step in range(len(case.rows)):
            engine.train_step(case.batch(step, replica, case.replicas), key=step, lr=0.01)
        save(engine, run, 1, world)
        engine.close()
        other = journey.then.on_ranks(topology(journey.then, ranks))
        read = load(other, run, world)
        tensors = (*other.module.state_dict().items(), *other.module.named_buffers())
        own = {name for name, tensor in tensors if not tensor.is_meta}
        assert {name if "/" not in name else parameter_of(name) for name in read} <= own
        save(other, run, 2, world)
        other.close()


def save(engine: Engine, run: Path, step: int, world: World) -> None:
    state = engine.state()
    write_snapshot(snapshot_path(run, step), state, record(state, step), lambda: None, world)


def load(engine: Engine, run: Path, world: World) -> list[str]:
    """Load the newest snapshot; the names of the tensors that this rank has read."""
    snapshot = newest(run, world)
    assert snapshot is not None
    names = []
    read = TensorFile.read

    def counted(self: TensorFile, name: str) -> torch.Tensor:
        names.append(name)
        return read(self, name)

    TensorFile.read = counted  # type: ignore[method-assign]
    engine.load_state(snapshot.state)
    TensorFile.read = read  # type: ignore[method-assign]
    return names


def newest(run: Path, world: World) -> Snapshot | None:
    search = search_together(snapshot_paths(run), (), world)
    return None if search.newest is None else open_large_snapshot(search.newest)


def train(
    case: Case, before: Callable[[int], None], rank: int, ranks: int, folder: Path, *, keep: int = 1
) -> None:
    """Train to the end with a snapshot after every step, resuming from the newest one."""
    run = folder / "run"
    world = World.current().for_thread(FOREVER)
    engine = case.on_ranks(topology(case, ranks))
    snapshot = newest(run, world)
    if snapshot is not None:
        engine.load_state(snapshot.state)
    start = Position() if snapshot is None else snapshot.record.position
    if rank == 0:
        rewind_snapshots(run, start.step, None if snapshot is None else snapshot.path)
    before(rank)
    resumed = None if snapshot is None else snapshot.record
    try:
        with SnapshotManager(run, engine, SPEC, Retention(1, keep, None), resumed, world=world) as manager:
            for step in range(start.step, SPEC.steps):
                engine.train_step(case.batch(step), key=step, lr=0.01)
                manager.after(trained(step + 1))
            manager.save_now()
    except Exception as error:  # noqa: BLE001 - the test checks which error it is
        notes = getattr(error, "__notes__", [])
        (folder / f"error-{rank}.json").write_text(json.dumps([type(error).__name__, str(error), notes]))
        os._exit(3)  # like a rank that failed: without waiting for the others
    engine.close()


def with_rows(case: Case) -> Case:
    return replace(case, rows=(4,) * SPEC.steps)
