"""Snapshots that several ranks write at once: they read as one, whoever wrote them, and no rank's death tears one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.distributed.world import World
from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import RunError
from gpipe_cli.runs.snapshots import durable, manager, manifest
from gpipe_cli.runs.snapshots.contents import decode_tensors, open_large_snapshot, open_snapshot
from gpipe_cli.runs.snapshots.manifest import (
    BUFFERS,
    FILES,
    INDEX,
    MODEL,
    OPTIMIZER,
    newest_valid_snapshot,
    read_snapshot,
    search_together,
    shard_name,
    snapshot_path,
)
from gpipe_cli.tensor_files.tensor_file import encode
from tests.distributed.cases import AVERAGED, Case, run
from tests.runs.snapshots.rank_snapshots import FOREVER, Journey, train, travel, with_rows
from tests.support.forked_ranks import exit_codes, run_ranks
from tests.support.forked_run import DeadlyDisk

PIPE = Case("perceptron", "1f1b", chunks=2)
TWO_BY_TWO = Case("perceptron", "1f1b", replicas=2, chunks=2)
JOURNEYS = [
    Journey(Case("tied", "gpipe", rows=(4,)), Case("tied", replicas=2)),
    Journey(Case("tied_without_dropout", replicas=2, rows=(8,), chunks=2), Case("tied_without_dropout")),
    Journey(
        Case("perceptron", "interleaved", optimizer=f"AdamW{AVERAGED}"),
        Case("perceptron", optimizer=f"AdamW{AVERAGED}"),
    ),
    Journey(
        Case("perceptron", replicas=2, rows=(8,), chunks=2, optimizer=f"AdamW{AVERAGED}"),
        Case("perceptron", "interleaved", optimizer=f"AdamW{AVERAGED}"),
    ),
    Journey(
        Case("tied", replicas=2, rows=(8,), chunks=2, optimizer=f"AdamW{AVERAGED}", sharded=True),
        Case("tied", replicas=4, optimizer=f"AdamW{AVERAGED}", sharded=True),
    ),
    Journey(Case("perceptron", precision="fp16"), Case("perceptron", replicas=2, precision="fp16")),
    Journey(Case("frozen_norms", deferred=True), Case("frozen_norms", replicas=2, deferred=True)),
    Journey(
        Case("frozen_start", replicas=2, rows=(8,), optimizer="SGD"), Case("frozen_start", optimizer="SGD")
    ),
]
DEADLY = [
    (0, "write", 2),
    (1, "write", 1),
    (1, "fsync", 1),
    (0, "rename", 0),
]
"""Rank, kind of call and how many of them in the second save it survives."""


@pytest.fixture(scope="module")
def journeys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journeys")
    run_ranks(partial(travel, JOURNEYS), 4, folder)
    return folder


def same(first: EngineState, second: EngineState) -> bool:
    return first.numbers == second.numbers and all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        for ours, theirs in (
            (getattr(first, part), getattr(second, part)) for part in ("model", "buffers", "optimizer")
        )
    )


@pytest.mark.parametrize("number", range(len(JOURNEYS)))
def test_ranks_in_another_arrangement_and_one_process_load_what_ranks_saved(
    journeys: Path, number: int
) -> None:
    paths = [snapshot_path(journeys / str(number), step) for step in (1, 2)]
    first, second = (open_snapshot(read_snapshot(path)).state for path in paths)
    assert same(first, second)
    case = JOURNEYS[number].case
    engine = case.alone()
    engine.load_state(open_large_snapshot(read_snapshot(paths[0], ())).state)
    assert same(engine.state(), first)
    if case.replicas == 1:  # replicas add gradients in another order
        assert same(run(case, case.alone(), case.batch).state, first)


def test_every_file_has_the_name_and_the_index_that_others_read(journeys: Path) -> None:
    path = snapshot_path(journeys / "0", 1)
    names = {entry.name for entry in path.iterdir()}
    shards = {shard_name(MODEL, rank, 4) for rank in range(4)}
    assert shard_name(MODEL, 1, 4) == "model-00002-of-00004.safetensors"
    assert (
        shards | {"model.safetensors.index.json", "optimizer.safetensors.index.json", "manifest.json"}
        <= names
    )
    verified = read_snapshot(path)
    for kind in (MODEL, OPTIMIZER):
        index = json.loads((path / f"{kind}{INDEX}").read_text())
        tensors = decode_tensors(verified, kind)
        assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        assert index["weight_map"].keys() == tensors.keys()
        for name, file in index["weight_map"].items():
            assert name in decode_tensors(replace(verified, contents={file: verified.contents[file]}), kind)


def test_an_older_gpipe_sees_another_format(journeys: Path) -> None:
    path = snapshot_path(journeys / "0", 1) / manifest.MANIFEST
    assert json.loads(path.read_text())["format"] == 2


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a snapshot whose manifest lists other files, with a digest that fits."""
    shutil.copytree(source, target)
    read = manifest.read_manifest(target)
    files = dict(read.files)
    change(files)
    (target / manifest.MANIFEST).write_bytes(manifest.encode(manifest.Manifest(files, read.record)))
    return target


def renamed(before: str, after: str) -> Callable[[dict[str, Any]], None]:
    return lambda files: files.update({after: files.pop(before)})


SECOND = shard_name(MODEL, 1, 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda files: files.pop(SECOND), f"does not list {SECOND}"),
        (lambda files: files.pop(f"{MODEL}{INDEX}"), "does not list model.safetensors.index.json"),
        (renamed(SECOND, "model-00005-of-00004.safetensors"), "does not describe a file of a snapshot"),
        (renamed(SECOND, "model-00000-of-00004.safetensors"), "does not describe a file of a snapshot"),
        (renamed(SECOND, "model-00002-of-00005.safetensors"), "does not describe a file of a snapshot"),
        (renamed(SECOND, "../model-00002-of-00004.safetensors"), "does not describe a file of a snapshot"),
        (renamed(SECOND, "model-00002-of-00004.safetensors\n"), "does not describe a file of a snapshot"),
        (
            renamed(SECOND, "model-\u0660\u0660002-of-00004.safetensors"),
            "does not describe a file of a snapshot",
        ),
        (lambda files: files.update({"other.index.json": files[SECOND]}), "does not describe a file"),
        (lambda files: files.update({MODEL: files[SECOND]}), "does not describe a file of a snapshot"),
    ],
)
def test_a_manifest_lists_all_shards_and_nothing_else(
    journeys: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    path = rewritten(snapshot_path(journeys / "0", 1), tmp_path / "step-00000001", change)
    with pytest.raises(RunError, match=says):
        read_snapshot(path)


def test_one_shard_alone_is_no_snapshot_in_shards() -> None:
    assert manifest.expected_names([shard_name(MODEL, 0, 1), "model-00001-of-00001.safetensors"]) == set()
    assert manifest.expected_names(["model-00000-of-00000.safetensors"]) == set()


def test_a_tensor_in_two_shards_is_damage(journeys: Path, tmp_path: Path) -> None:
    source = snapshot_path(journeys / "0", 1)
    first, second = (source / shard_name(MODEL, rank, 4) for rank in (0, 1))

    def repeat(files: dict[str, Any]) -> None:
        files[second.name] = files[first.name]

    path = rewritten(source, tmp_path / "step-00000001", repeat)
    shutil.copy(first, path / second.name)
    for opened in (open_snapshot, open_large_snapshot):
        with pytest.raises(RunError, match=r"damaged: another shard has .* as well"):
            opened(read_snapshot(path))


def test_an_index_is_verified_like_every_file_and_leads_nowhere(journeys: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    shutil.copytree(snapshot_path(journeys / "0", 1), path)
    (path / f"{MODEL}{INDEX}").write_text('{"weight_map": {"x": "../../secret"}}')
    with pytest.raises(RunError, match=r"model.safetensors.index.json: damaged: it has \d+ bytes instead of"):
        read_snapshot(path)


def test_the_shards_of_a_snapshot_as_one_file_are_what_one_process_writes(journeys: Path) -> None:
    """What gpipe export writes does not depend on who saved."""
    case = JOURNEYS[0].case
    state = run(case, case.alone(), case.batch).state
    saved = read_snapshot(snapshot_path(journeys / "0", 1))
    for kind, tensors in zip(FILES, (state.model, state.optimizer, state.buffers), strict=True):
        assert b"".join(encode(decode_tensors(saved, kind))) == b"".join(encode(tensors))


def _find(run: Path, rank: int, ranks: int, folder: Path) -> None:
    search = search_together(manifest.snapshot_paths(run), (BUFFERS,), World.current().for_thread(FOREVER))
    assert search.newest is not None
    found = [search.newest.path.name, [str(error) for error in search.damaged.values()]]
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


def test_ranks_share_the_verification_and_find_the_same_snapshot(journeys: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(journeys / "0", run)
    damaged = snapshot_path(run, 2) / shard_name(OPTIMIZER, 2, 4)
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    run_ranks(partial(_find, run), 3, tmp_path)
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(3)]
    assert found == [found[0]] * 3
    name, reasons = found[0]
    assert (
        name == "step-00000001" and len(reasons) == 1 and f"{damaged}: damaged: its sha256 is" in reasons[0]
    )


def second_save(folder: Path) -> Path:
    return folder / "run" / "snapshots" / f"step-00000002{durable.UNFINISHED}"


def killing(victim: int, disk: DeadlyDisk) -> Callable[[int], None]:
    def before(rank: int) -> None:
        if rank == victim:
            durable.os = disk  # type: ignore[assignment]

    return before


def unharmed(rank: int) -> None:
    pass


def final(folder: Path) -> tuple[bytes, ...]:
    snapshots = newest_valid_snapshot(folder / "run")
    assert snapshots.newest is not None and not snapshots.damaged
    assert snapshots.newest.path == snapshot_path(folder / "run", 4)
    names = {path.name for path in (folder / "run" / "snapshots").iterdir()}
    assert names == {"step-00000004"}, "nothing half-written or old is left"
    return tuple(b"".join(encode(decode_tensors(snapshots.newest, kind))) for kind in FILES)


def launched(
    folder: Path, before: Callable[[int], None], ranks: int = 2, case: Case = PIPE
) -> list[int | None]:
    (folder / "run" / "snapshots").mkdir(parents=True, exist_ok=True)
    (folder / "rendezvous").unlink(missing_ok=True)
    return exit_codes(partial(train, with_rows(case), before), ranks, folder, 120)


def torn(folder: Path, victim: int, disk: DeadlyDisk, ranks: int, case: Case) -> bool:
    """Whether the victim died; if so, what it leaves is whole, and resumes."""
    codes = launched(folder, killing(victim, disk), ranks, case)
    if codes == [0] * ranks:
        return False
    assert codes[victim] == -signal.SIGKILL and None not in codes, codes
    assert not newest_valid_snapshot(folder / "run").damaged, "what has the name of a snapshot is whole"
    return True


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, ...]:
    folder = tmp_path_factory.mktemp("unbroken")
    assert launched(folder, unharmed) == [0, 0]
    return final(folder)


@pytest.mark.parametrize(("victim", "kind", "survives"), DEADLY)
def test_any_rank_may_be_killed_at_any_write_fsync_or_rename(
    tmp_path: Path, unbroken: tuple[bytes, ...], victim: int, kind: str, survives: int
) -> None:
    assert torn(tmp_path, victim, DeadlyDisk(survives, (kind,), second_save(tmp_path)), 2, PIPE)
    newest = newest_valid_snapshot(tmp_path / "run").newest
    assert newest is not None and newest.path == snapshot_path(tmp_path / "run", 1)
    assert launched(tmp_path, unharmed) == [0, 0]
    assert final(tmp_path) == unbroken


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", range(4))
def test_every_call_that_changes_the_disk_may_be_the_last_of_any_rank(tmp_path: Path, victim: int) -> None:
    (tmp_path / "unbroken").mkdir()
    assert launched(tmp_path / "unbroken", unharmed, 4, TWO_BY_TWO) == [0] * 4
    expected, count = final(tmp_path / "unbroken"), 0
    while torn(tmp_path / str(count), victim, DeadlyDisk(count), 4, TWO_BY_TWO):
        assert launched(tmp_path / str(count), unharmed, 4, TWO_BY_TWO) == [0] * 4
        assert final(tmp_path / str(count)) == expected
        shutil.rmtree(tmp_path / str(count))
        count += 1
    assert count > (60 if victim == 0 else 20)


def test_a_full_disk_of_one_rank_ends_all_with_that_cause_and_leaves_the_snapshot_before(
    tmp_path: Path,
) -> None:
    def before(rank: int) -> None:
        if rank == 1:
            durable._write = full  # type: ignore[assignment]

    write = durable._write

    def full(*arguments: Any) -> Any:
        if second_save(tmp_path).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    assert launched(tmp_path, before) == [3, 3]
    errors = [json.loads((tmp_path / f"error-{rank}.json").read_text()) for rank in range(2)]
    assert errors[1][0] == "ResourceError" and "the snapshot cannot be written: [Errno 28]" in errors[1][1]
    # Rank 0 hears it from the other writers, or loses its peer in a step first and adds it as a note.
    assert any(f"rank 1: {errors[1][1]}" in text for text in (errors[0][1], *errors[0][2])), errors
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == ["step-00000001"]
    assert newest_valid_snapshot(tmp_path / "run").newest is not None


def test_a_rank_that_sees_another_run_directory_says_so(tmp_path: Path) -> None:
    def before(rank: int) -> None:
        if rank == 1:
            other = tmp_path / "elsewhere" / "run"
            (other / "snapshots").mkdir(parents=True)
            manager.snapshot_path = lambda run, step: snapshot_path(other, step)  # type: ignore[assignment]

    assert launched(tmp_path, before) == [3, 3]
    kind, text, _ = json.loads((tmp_path / "error-1.json").read_text())
    assert (
        kind == "ResourceError"
        and "rank 0 began this snapshot, but it is not here; every machine must" in text
    )
    assert not os.listdir(tmp_path / "run" / "snapshots")  # noqa: PTH208 - names only
