from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import nn

from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.runs.snapshots import contents, manager
from gpipe_cli.runs.snapshots.contents import open_snapshot
from gpipe_cli.runs.snapshots.manager import Retention, SnapshotManager, check_snapshot_space
from gpipe_cli.runs.snapshots.manifest import newest_valid_snapshot, snapshot_path
from gpipe_cli.training.loop import TrainFact, TrainSpec
from gpipe_cli.training.lr_schedules import Constant
from tests.support.step_results import evaluated, trained

PLAN = TrainSpec(steps=8, steps_per_epoch=2, lr=0.1, lr_schedule=Constant(), seed=0)
SPEC = TrainSpec(steps=40, steps_per_epoch=10, lr=0.1, lr_schedule=Constant(), seed=0)


@final
class Fake:
    """An engine whose state is its step."""

    def __init__(self) -> None:
        self.module: nn.Module = nn.Identity()
        self.weight = torch.zeros(1000)

    def state(self) -> EngineState:
        return EngineState({"weight": self.weight})

    def load_state(self, state: EngineState) -> None: ...
    def before_update(self, wait: Callable[[], None]) -> None: ...
    def close(self) -> None: ...
    def train_step(self, batch: Any, key: int, lr: float, *, measure: bool = True) -> Any: ...
    def eval_step(self, batch: Any) -> Any: ...


@contextmanager
def keeping(run: Path, retention: Retention) -> Iterator[tuple[SnapshotManager, Any]]:
    engine = Fake()
    with SnapshotManager(run, engine, PLAN, retention) as keeping:

        def follow(*facts: TrainFact) -> None:
            for fact in facts:
                engine.weight.fill_(fact.step)
                keeping.after(fact)

        yield keeping, follow


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "snapshots").iterdir())


def test_it_saves_every_few_steps_and_the_last(tmp_path: Path) -> None:
    with keeping(tmp_path, Retention(3, 9, None)) as (_, follow):
        for step in range(1, 9):
            follow(trained(step), *([evaluated(step)] if step % 2 == 0 else []))
    assert steps(tmp_path) == [3, 6, 8]


def test_it_saves_every_epoch_after_its_evaluation(tmp_path: Path) -> None:
    with keeping(tmp_path, Retention(None, 9, None)) as (_, follow):
        follow(trained(1), trained(2))
        assert steps(tmp_path) == []
        follow(evaluated(2), trained(3))
    newest = newest_valid_snapshot(tmp_path).newest
    assert newest is not None
    snapshot = open_snapshot(newest)
    assert snapshot.record.position.evaluated and steps(tmp_path) == [2]
    assert torch.equal(snapshot.state.model["weight"], torch.full((1000,), 2.0)), "the copy is of that step"


@pytest.mark.parametrize(
    ("monitor", "values", "best"),
    [
        ("loss", [3.0, 1.0, 2.0, 2.0], 4),
        ("top1", [0.1, 0.9, 0.5, 0.9], 4),
        ("mean_absolute_error", [3.0, 1.0, 2.0, 4.0], 4),
    ],
)
def test_the_newest_and_the_best_stay(tmp_path: Path, monitor: str, values: list[float], best: int) -> None:
    with keeping(tmp_path, Retention(None, 1, monitor)) as (_, follow):
        for epoch, value in enumerate(values):
            fact = evaluated(2 * epoch + 2, **{monitor: value})
            follow(trained(fact.step), fact)
    assert steps(tmp_path) == [best, 8]


@pytest.mark.parametrize(("finished", "left"), [(None, [2, 4, 6, 8]), (1, [2, 8]), (2, [2, 6, 8])])
def test_a_finished_run_keeps_the_last_snapshots_and_the_best_one(
    tmp_path: Path, finished: int | None, left: list[int]
) -> None:
    with keeping(tmp_path, Retention(None, 3, "loss", finished)) as (snapshots, follow):
        for step in (2, 4, 6, 8):
            follow(trained(step), evaluated(step, step))
        snapshots.save_now()
        assert steps(tmp_path) == [2, 4, 6, 8]
        snapshots.remove_unneeded()
    assert steps(tmp_path) == left


def test_an_evaluation_that_is_the_best_is_saved_in_between(tmp_path: Path) -> None:
    with keeping(tmp_path, Retention(100, 9, "loss")) as (_, follow):
        follow(trained(2), evaluated(2, 1.0), trained(4), evaluated(4, 2.0), trained(6), evaluated(6, 0.5))
    assert steps(tmp_path) == [2, 6]


def test_what_it_does_not_own_is_never_removed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "mine").mkdir()
    snapshot_path(tmp_path, 1).symlink_to(canary, target_is_directory=True)
    with keeping(tmp_path, Retention(2, 1, None)) as (_, follow):
        follow(trained(2), evaluated(2), trained(4), evaluated(4))
    names = {path.name for path in (tmp_path / "snapshots").iterdir()}
    assert names == {"mine", "step-00000001", "step-00000004"} and canary.is_dir()


def test_another_runs_snapshots_are_never_removed(tmp_path: Path) -> None:
    """snapshots -> ../other/snapshots with snapshot.keep=1 deleted those of the other run."""
    snapshot_path(tmp_path / "other", 1).mkdir(parents=True)
    run = tmp_path / "run"
    run.mkdir()
    (run / "snapshots").symlink_to("../other/snapshots", target_is_directory=True)
    with (
        pytest.raises(RunError, match=r"run/snapshots: 'snapshots' is a symbolic link, not a directory"),
        keeping(run, Retention(2, 1, None)),
    ):
        pass
    assert steps(tmp_path / "other") == [1]


def test_a_link_that_takes_the_place_of_the_folder_while_training_is_not_followed(tmp_path: Path) -> None:
    snapshot_path(tmp_path / "other", 1).mkdir(parents=True)
    run = tmp_path / "run"
    run.mkdir()

    def train() -> None:
        with keeping(run, Retention(2, 1, None)) as (_, follow):
            (run / "snapshots").rmdir()
            (run / "snapshots").symlink_to("../other/snapshots", target_is_directory=True)
            follow(trained(2), evaluated(2), trained(4), evaluated(4))

    with pytest.raises(ResourceError, match=r"cannot be written: 'snapshots' is a symbolic link"):
        train()
    assert steps(tmp_path / "other") == [1]


def test_training_goes_on_while_a_snapshot_is_written_and_hears_of_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, failed = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        go.wait(60)
        failed.set()
        raise ResourceError("the disk is full")

    monkeypatch.setattr(manager, "write_snapshot", slow)
    with (
        pytest.raises(ResourceError, match="the disk is full"),
        keeping(tmp_path, Retention(3, 1, None)) as (_, follow),
    ):
        follow(trained(3))
        follow(trained(5))  # is not kept waiting
        go.set()
        failed.wait(60)
        follow(trained(6))  # waits for the previous save, and raises its error


def test_nothing_old_is_removed_if_the_new_one_reads_back_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(path: Path, *rest: Any) -> None:
        contents.write_snapshot(path, *rest)
        (path / "model.safetensors").write_bytes(b"")

    with (
        pytest.raises(ResourceError, match="does not read back as written"),
        keeping(tmp_path, Retention(2, 1, None)) as (_, follow),
    ):
        follow(trained(2), evaluated(2))
        monkeypatch.setattr(manager, "write_snapshot", torn)
        follow(trained(4), evaluated(4), trained(6), evaluated(6))
    assert steps(tmp_path) == [2, 4]


def test_an_interrupt_does_not_wait_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def endless(path: Path, state: Any, record: Any, between: Any, world: Any) -> None:
        begun.set()
        while True:
            between()

    monkeypatch.setattr(manager, "write_snapshot", endless)
    with pytest.raises(KeyboardInterrupt), keeping(tmp_path, Retention(1, 1, None)) as (_, follow):
        follow(trained(1))
        begun.wait(60)
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name == "gpipe-snapshot"]


def test_an_unknown_metric_is_told_at_the_first_step(tmp_path: Path) -> None:
    says = (
        r"snapshot.monitor=top9: this run does not measure it; choose one of: loss, mean_absolute_error, top1"
    )
    with pytest.raises(ConfigError, match=says), keeping(tmp_path, Retention(1, 1, "top9")) as (_, follow):
        follow(trained(1))


def test_asking_twice_saves_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with keeping(tmp_path, Retention(100, 1, None)) as (snapshots, follow):
        follow(trained(1))
        snapshots.save_now()
        monkeypatch.setattr(manager, "write_snapshot", None)
        snapshots.save_now()
    assert steps(tmp_path) == [1] and replace(snapshots.position, seconds=0.0).step == 1


@pytest.mark.parametrize(
    ("retention", "most"),
    [
        (Retention(None, keep=1, monitor=None), 2),
        (Retention(None, keep=3, monitor="loss"), 4),  # there are four evaluations, so no more than four
        (Retention(None, keep=30, monitor="loss"), 4),
        (Retention(5, keep=3, monitor="loss"), 5),
        (Retention(30, keep=5, monitor=None), 2),  # at step 30 and at the end
        (Retention(30, keep=8, monitor="loss"), 6),
        (Retention(100, keep=3, monitor=None), 1),
    ],
)
def test_as_many_as_are_kept_lie_there_and_one_that_is_being_written(retention: Retention, most: int) -> None:
    assert retention.max_snapshots(SPEC) == most


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2500))


@pytest.mark.usefixtures("free")
def test_no_room_for_one_is_an_error_and_no_room_for_all_a_warning(tmp_path: Path) -> None:
    run, retention = tmp_path / "not" / "there" / "yet", Retention(5, keep=3, monitor="loss")
    with pytest.raises(
        ResourceError, match=r"yet: no room for a snapshot: it needs about 2,501 bytes, 2,500"
    ):
        check_snapshot_space(run, SPEC, retention, 2501)
    warning = check_snapshot_space(run, SPEC, retention, 1024)
    assert warning is not None
    assert (
        "yet: the run will keep 5 snapshots of about 1KiB, but only 2 fit into the 2.45KiB that are free"
        in warning
    )
    assert check_snapshot_space(run, SPEC, retention, 500) is None


@pytest.mark.usefixtures("free")
def test_snapshots_that_are_there_already_need_no_room(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        (tmp_path / "snapshots" / f"step-{step:08d}").mkdir(parents=True)
    assert check_snapshot_space(tmp_path, SPEC, Retention(5, keep=3, monitor="loss"), 2500) is None
