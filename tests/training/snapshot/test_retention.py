"""Room for snapshots: how many lie there at once, and what is said of a disk that is too small."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpipe_cli.errors import ResourceError
from gpipe_cli.training.loop import TrainSpec
from gpipe_cli.training.lr_schedules import Constant
from gpipe_cli.training.snapshot.retention import Retention, check_snapshot_space

SPEC = TrainSpec(steps=40, steps_per_epoch=10, lr=0.1, lr_schedule=Constant(), seed=0)


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
