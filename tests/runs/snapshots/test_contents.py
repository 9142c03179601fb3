"""Snapshots on disk: whole, verified, byte-equal for equal states, and refused if anything of them has changed."""

from __future__ import annotations

import errno
import os
import random
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.runs.snapshots import durable, manifest
from gpipe_cli.runs.snapshots.contents import (
    check_savable,
    copy_state,
    open_snapshot,
    replace_record,
    write_snapshot,
)
from gpipe_cli.runs.snapshots.manifest import (
    newest_valid_snapshot,
    read_snapshot,
    rewind_snapshots,
    snapshot_path,
    snapshot_paths,
    unfinished_paths,
)
from gpipe_cli.runs.snapshots.record import BestEvaluation, TrainingRecord, versions
from gpipe_cli.training.loop import EvalResult, LossWindow, Position

EVALUATION = EvalResult(
    step=4, epoch=0, loss=0.1 + 0.2, means={"top1": 1 / 3}, samples=9, lr=1e-3, took=0.5, seconds=2.5
)


def state() -> EngineState:
    return EngineState(
        model={"a.weight": torch.randn(4, 3), "a.count": torch.tensor(7)},
        buffers={"a.mask": torch.ones(3, dtype=torch.bool)},
        optimizer={"a.weight/exp_avg": torch.randn(4, 3), "a.weight/step": torch.tensor(4.0)},
        numbers={
            "optimizer": {"state": {"a.weight": {"n": 3}}, "groups": [{}]},
            "scaler": {"scale": 65536.0},
        },
    )


def record(step: int = 4, **changes: Any) -> TrainingRecord:
    best = BestEvaluation("loss", 0.25, 2)
    whole = TrainingRecord(
        Position(step, 3.5, EVALUATION, LossWindow(2, 0.1, -1.5, 1.6)),
        best,
        4,
        7,
        1,
        versions(),
        state().numbers,
    )
    return replace(whole, **changes)


def go_on() -> None:
    pass


def write(run: Path, step: int = 4, saved: EngineState | None = None) -> Path:
    path = snapshot_path(run, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_snapshot(path, saved or state(), record(step), go_on)
    return path


def test_what_is_saved_comes_back_to_the_bit(tmp_path: Path) -> None:
    saved = state()
    restored = open_snapshot(read_snapshot(write(tmp_path, saved=saved)))
    assert restored.record == record()
    assert restored.state.numbers == saved.numbers
    for part in ("model", "buffers", "optimizer"):
        before, now = getattr(saved, part), getattr(restored.state, part)
        assert before.keys() == now.keys()
        assert all(torch.equal(before[name], now[name]) for name in before)


def test_equal_states_give_byte_equal_files(tmp_path: Path) -> None:
    saved = state()
    first, second = write(tmp_path / "a", saved=saved), write(tmp_path / "b", saved=saved)
    assert {path.name for path in first.iterdir()} == {*manifest.FILES, manifest.MANIFEST}
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_a_hundred_bit_flips_and_cuts_are_all_noticed(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = {file: file.read_bytes() for file in path.iterdir()}
    chance = random.Random(0)
    for attempt in range(100):
        file = chance.choice(sorted(whole))
        damaged = bytearray(whole[file])
        if attempt % 4:
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        else:
            del damaged[chance.choice([0, 10, len(damaged) // 2, len(damaged) - 1]) :]
        file.write_bytes(damaged)
        with pytest.raises(RunError, match=r"damaged|format"):
            read_snapshot(path)
        file.write_bytes(whole[file])
    read_snapshot(path)


@pytest.mark.parametrize("name", [*manifest.FILES, manifest.MANIFEST])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path)
    (path / name).unlink()
    with pytest.raises(RunError, match=name):
        read_snapshot(path)


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": True},
        {"evaluation": {"step": 1}},
        {"evaluation": 3},
        {"best": {"metric": 1, "value": "x", "step": 1}},
        {"engine": 3},
        {"versions": 7},
        {"seconds": "1"},
        {"seconds": 1e300},
        {"seconds": -1e300},
        {"seconds": float("nan")},
        {"seconds": 0.0},
        {"step": 2**70},
        {"epoch": 7},
        {"batch": None},
        {"steps_per_epoch": 0},
        {"versions": {"torch": 2}},
        {"evaluation": {**asdict(EVALUATION), "step": 5}},
        {"evaluation": {**asdict(EVALUATION), "samples": 0}},
        {"evaluation": {**asdict(EVALUATION), "loss": float("inf")}},
        {"evaluation": {**asdict(EVALUATION), "means": [["top1", 1.0]]}},
    ],
)
def test_a_record_that_is_whole_but_wrong_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Somebody who can write a file can write its digest too."""
    path = write(tmp_path)
    read = manifest.read_manifest(path)
    hostile = manifest.Manifest(read.files, {**read.record, **change})
    (path / manifest.MANIFEST).write_bytes(manifest.encode(hostile))
    with pytest.raises(RunError, match="its record cannot be used"):
        open_snapshot(read_snapshot(path))


def test_a_number_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    """`seconds` of 400 digits ended in an OverflowError."""
    path = write(tmp_path)
    read = manifest.read_manifest(path)
    hostile = manifest.Manifest(read.files, {**read.record, "seconds": 10**400})
    (path / manifest.MANIFEST).write_bytes(manifest.encode(hostile))
    with pytest.raises(RunError, match=r"manifest.json: damaged: it has a number of 401 digits"):
        read_snapshot(path)


def test_a_snapshot_of_another_step_than_its_name_says_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(RunError, match=r"it belongs to step 4, unlike its directory"):
        open_snapshot(read_snapshot(path.rename(path.with_name("step-00000005"))))
    open_snapshot(read_snapshot((path.with_name("step-00000005")).rename(tmp_path / "kept")))


@pytest.mark.parametrize("name", [*manifest.FILES, manifest.MANIFEST])
def test_only_files_of_the_snapshot_itself_are_read(tmp_path: Path, name: str) -> None:
    path = write(tmp_path)
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"{name}: .*is a symbolic link"):
        read_snapshot(path)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(RunError, match=f"{name}: .*is a named pipe"):
        read_snapshot(path)


def test_a_folder_of_snapshots_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with code 1."""

    def refused(folder: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    write(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refused)
        with pytest.raises(RunError, match=r"snapshots: cannot be read: .*Permission denied"):
            snapshot_paths(tmp_path)
    (tmp_path / "snapshots").rename(tmp_path / "elsewhere")
    (tmp_path / "snapshots").symlink_to("elsewhere")
    with pytest.raises(RunError, match="snapshots: cannot be read: 'snapshots' is a symbolic link"):
        snapshot_paths(tmp_path)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "other.safetensors"])
def test_a_manifest_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    path = write(tmp_path)
    read = manifest.read_manifest(path)
    hostile = manifest.Manifest({name: read.files[manifest.MODEL]}, read.record)
    (path / manifest.MANIFEST).write_bytes(manifest.encode(hostile))
    with pytest.raises(RunError, match="does not describe a file of a snapshot"):
        read_snapshot(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"[" * 10**5, b'{"format": 2}', b"\xff\xfe"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path)
    (path / manifest.MANIFEST).write_bytes(content)
    with pytest.raises(RunError, match=r"damaged|has the format"):
        read_snapshot(path)


def test_a_copy_stays_as_it_is_and_its_memory_is_used_again() -> None:
    saved = state()
    copy = copy_state(saved)
    before = {name: tensor.clone() for name, tensor in saved.model.items()}
    for tensor in saved.model.values():
        tensor.add_(1)
    assert all(torch.equal(copy.model[name], before[name]) for name in before)
    again = copy_state(replace(saved, optimizer={"a.weight/step": torch.zeros(2)}), copy)
    assert all(again.model[name].data_ptr() == copy.model[name].data_ptr() for name in before)
    assert all(torch.equal(again.model[name], saved.model[name]) for name in before)
    assert torch.equal(again.optimizer["a.weight/step"], torch.zeros(2))


def test_a_record_of_an_older_version_has_no_window() -> None:
    content = {name: value for name, value in record().to_json().items() if name != "window"}
    assert TrainingRecord.from_json(content).position == Position(4, 3.5, EVALUATION)


def test_the_record_can_be_amended_without_touching_a_tensor(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = {name: (path / name).stat().st_mtime_ns for name in manifest.FILES}
    replace_record(path, record(position=Position(4, 9.0)))
    assert open_snapshot(read_snapshot(path)).record.position == Position(4, 9.0)
    assert {name: (path / name).stat().st_mtime_ns for name in manifest.FILES} == before


def test_the_newest_valid_one_is_found_and_damaged_ones_are_named(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        write(tmp_path, step)
    assert [path.name for path in snapshot_paths(tmp_path)] == [f"step-{n:08d}" for n in (100, 20, 9)]
    newest = snapshot_path(tmp_path, 100)
    (newest / manifest.OPTIMIZER).write_bytes(b"")
    snapshots = newest_valid_snapshot(tmp_path)
    assert snapshots.newest is not None and snapshots.newest.path == snapshot_path(tmp_path, 20)
    assert list(snapshots.damaged) == [newest] and manifest.OPTIMIZER in str(snapshots.damaged[newest])


def test_only_real_directories_with_the_right_name_are_snapshots(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    (path.parent / "step-00000009").symlink_to(path, target_is_directory=True)
    (path.parent / "step-00000007.tmp").mkdir()
    (path.parent / "step-00000008").touch()
    (path.parent / "step-5").mkdir()
    (path.parent / "mine.tmp").mkdir()
    assert snapshot_paths(tmp_path) == [path]
    assert [path.name for path in unfinished_paths(tmp_path)] == ["step-00000007.tmp"]
    assert snapshot_paths(tmp_path / "nowhere") == []


def test_a_failed_save_names_path_need_and_free_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, piece: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.os, "write", full)
    says = r"step-00000004: the snapshot cannot be written: .*No space left.*; it needs \d+ bytes, [\d,]+ are free"
    with pytest.raises(ResourceError, match=says):
        write(tmp_path)
    assert not list((tmp_path / "snapshots").iterdir())


def test_what_a_snapshot_cannot_hold_is_told_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"'w' has the dtype torch.complex64, which a snapshot cannot hold"):
        check_savable(EngineState({"w": torch.ones(2, dtype=torch.complex64)}))


def test_a_snapshot_that_was_removed_halfway_is_never_seen(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    canary = tmp_path / "canary"
    canary.mkdir()
    (path / "link").symlink_to(canary, target_is_directory=True)
    durable.remove_atomically(path, tmp_path)
    assert canary.is_dir() and not list(path.parent.iterdir())


def test_a_half_written_file_never_replaces_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "config.yaml"
    target.write_text("old")

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable.os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        durable.write_file(target, [b"new"])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_file_that_must_be_new_replaces_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out"
    durable.write_file(target, [b"new"], replace=False)
    with pytest.raises(FileExistsError):
        durable.write_file(target, [b"newer"], replace=False)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]
    shutil.rmtree(tmp_path)


def test_snapshots_of_a_future_that_is_given_up_are_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    for name in (
        "step-00000003",
        "step-00000005",
        "step-00000007",
        "step-00000007.quarantined",
        "step-00000009.tmp",
        "own",
    ):
        (folder / name).mkdir(parents=True)
    assert rewind_snapshots(tmp_path, 5, folder / "step-00000005") == ["step-00000007.quarantined-2"]
    names = {
        "step-00000003",
        "step-00000005",
        "step-00000007.quarantined",
        "step-00000007.quarantined-2",
        "own",
    }
    assert {path.name for path in folder.iterdir()} == names
    rewind_snapshots(tmp_path, 0, None)
    assert not list(folder.glob("step-????????"))
