"""A large state is written without a copy: the next step runs up to its update, which waits for the writer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.build.optimizer import optimizer_factory
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.engines import single, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec, TrainingObjective
from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ResourceError
from gpipe_cli.losses.measures import accuracy
from gpipe_cli.runs.snapshots import manager
from gpipe_cli.runs.snapshots.contents import open_snapshot, write_snapshot
from gpipe_cli.runs.snapshots.manager import Retention, SnapshotManager
from gpipe_cli.runs.snapshots.manifest import read_snapshot, snapshot_path
from gpipe_cli.training.loop import TrainSpec
from gpipe_cli.training.lr_schedules import Constant
from tests.support.step_results import trained

SPEC = TrainSpec(steps=4, steps_per_epoch=4, lr=0.1, lr_schedule=Constant(), seed=0)
CPU = torch.device("cpu")
BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])


class Told(nn.Module):
    """Sets an event in every training step, once its forward has changed the buffers of the batch norm."""

    def __init__(self, ran: threading.Event) -> None:
        super().__init__()
        self._ran = ran

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self._ran.set()
        return input


def make_engine(ran: threading.Event, name: str, ema: float | None) -> Engine:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Told(ran), nn.Linear(8, 3))
    settings = TrainConfig(optimizer={"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}, ema=ema)
    objective = TrainingObjective(nn.functional.cross_entropy, accuracy, optimizer_factory(settings, module))
    balance = [4] if name == "single" else [2, 2]
    spec = EngineSpec(module, objective, balance, [CPU] * len(balance), chunks=2, eval_chunks=2)
    return single.build(spec) if name == "single" else threads.build(spec)


def copied(state: EngineState) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in (state.model | state.optimizer).items()}


@pytest.mark.parametrize("ema", [None, 0.5])
@pytest.mark.parametrize("name", ["single", "threads"])
def test_the_update_of_the_next_step_waits_for_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ema: float | None
) -> None:
    ran = threading.Event()
    engine = make_engine(ran, name, ema)

    def write_after_forward(*arguments: Any) -> None:
        # With ema, the weights in training take their place at the beginning of a step, which has to wait then.
        assert ema is not None or ran.wait(60), "the next step does not begin"
        write_snapshot(*arguments)

    monkeypatch.setattr(manager, "COPIED_BYTES", 0)
    monkeypatch.setattr(manager, "write_snapshot", write_after_forward)
    saved = {}
    with SnapshotManager(tmp_path, engine, SPEC, Retention(1, 9, None)) as snapshots:
        for step in range(1, 4):
            engine.train_step(BATCH, key=step, lr=0.1)
            ran.clear()
            saved[step] = copied(engine.state())
            snapshots.after(trained(step))
        ran.set()  # no step follows the last one
    engine.close()
    for step, expected in saved.items():
        state = open_snapshot(read_snapshot(snapshot_path(tmp_path, step))).state
        assert state.model.keys() | state.optimizer.keys() == expected.keys()
        differing = [
            key
            for key, tensor in (state.model | state.optimizer).items()
            if not torch.equal(tensor, expected[key])
        ]
        assert differing == []


def test_a_state_that_is_copied_keeps_no_update_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, updated = threading.Event(), threading.Event()
    engine = make_engine(ran, "single", None)

    def write_after_update(*arguments: Any) -> None:
        assert updated.wait(60), "the update waits for the writer"
        write_snapshot(*arguments)

    monkeypatch.setattr(manager, "write_snapshot", write_after_update)
    with SnapshotManager(tmp_path, engine, SPEC, Retention(2, 9, None)) as snapshots:
        for step in (1, 2, 3):
            engine.train_step(BATCH, key=step, lr=0.1)
            snapshots.after(trained(step))
        updated.set()
    engine.close()


def test_a_write_that_fails_stops_the_next_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(threading.Event(), "single", None)

    def fail(*arguments: Any) -> None:
        raise ResourceError("the disk is full")

    monkeypatch.setattr(manager, "COPIED_BYTES", 0)
    monkeypatch.setattr(manager, "write_snapshot", fail)
    with SnapshotManager(tmp_path, engine, SPEC, Retention(1, 9, None)) as snapshots:
        engine.train_step(BATCH, key=1, lr=0.1)
        before = copied(engine.state())
        snapshots.after(trained(1))
        with pytest.raises(ResourceError, match="the disk is full"):
            engine.train_step(BATCH, key=2, lr=0.1)
        after = copied(engine.state())
    assert all(torch.equal(before[key], after[key]) for key in before if "1." not in key[:2])
    engine.close()
