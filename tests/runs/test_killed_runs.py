"""A run that was killed and resumed equals one that never was, in every bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.runs.snapshots.manifest import newest_valid_snapshot, snapshot_paths
from tests.support import forked_run
from tests.support.forked_run import (
    Case,
    Spoil,
    in_a_child,
    kill_at,
    result,
    run,
    with_deadly_disk,
    with_position,
    without,
    without_best,
    without_numbers,
)

HALF = Case(optimizer="sgd", clip=0.1, precision="bf16")
SCALED = Case(optimizer="decaying", precision="fp16", every=None)
REFERENCES: dict[Case, dict[str, Any]] = {}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    forked_run.warm_up()


def reference(case: Case, folder: Path) -> dict[str, Any]:
    """What the case gives when nothing happens to it."""
    if case not in REFERENCES:
        directory = folder / f"reference-{len(REFERENCES)}"
        assert in_a_child(lambda: run(directory, case)) == 0
        REFERENCES[case] = result(directory)
    return REFERENCES[case]


@pytest.mark.parametrize(
    ("case", "facts"),
    [
        (Case(), 4),  # in the middle of an epoch
        pytest.param(Case(), 5, marks=pytest.mark.slow),
        (Case(every=2), 3),  # the last step of an epoch is done, its evaluation is not
        (Case(every=2), 4),  # both are
        pytest.param(Case(every=2, workers=2), 7, marks=pytest.mark.slow),
        (HALF, 7),
        (replace(HALF, in_place=True, every=2), 7),
        (SCALED, 7),
        pytest.param(Case(optimizer="nadam", clip=1.0), 8, marks=pytest.mark.slow),
        pytest.param(Case(balance=(2, 6)), 8, marks=pytest.mark.slow),
        (Case(slices=3), 8),
        (Case(slices=5, optimizer="decaying", clip=1.0), 5),
    ],
)
def test_a_run_that_was_killed_goes_on_to_the_bit(tmp_path: Path, case: Case, facts: int) -> None:
    expected = reference(case, tmp_path)
    directory = tmp_path / "run"
    assert in_a_child(lambda: run(directory, case, at_fact=kill_at(facts))) == -signal.SIGKILL
    assert newest_valid_snapshot(directory).newest is not None
    assert in_a_child(lambda: run(directory, case)) == 0
    assert result(directory) == expected


def test_it_may_go_on_with_other_partitions_workers_and_engine(tmp_path: Path) -> None:
    expected = reference(Case(), tmp_path)
    directory = tmp_path / "run"
    for facts, case in (
        (4, Case()),
        (4, Case(balance=(3, 5), workers=1)),
        (4, Case(slices=3)),
        (99, Case(balance=(1, 2, 5))),
    ):
        code = in_a_child(lambda case=case, facts=facts: run(directory, case, at_fact=kill_at(facts)))
        assert code in (0, -signal.SIGKILL)
    assert result(directory) == expected


KILLED: dict[Case, Path] = {}


def killed(case: Case, folder: Path) -> Path:
    """A run that was killed after six steps; the same for all tests, so it is killed once."""
    if case not in KILLED:
        KILLED[case] = folder / "killed"
        assert in_a_child(lambda: run(KILLED[case], case, at_fact=kill_at(6))) == -signal.SIGKILL
    return KILLED[case]


@pytest.mark.parametrize(
    ("case", "spoil"),
    [
        (Case(), without("model", "0.weight")),
        (Case(), without("model", "7.bias")),
        (Case(), without("model", "running_mean")),
        (Case(), without("model", "running_var")),
        (Case(), without("model", "1.num_batches_tracked")),
        (Case(), without("buffers", "calls")),
        (Case(), without("optimizer", "5.weight/exp_avg")),
        (Case(), without("optimizer", "/exp_avg_sq")),
        (Case(), without("optimizer", "/max_exp_avg_sq")),
        (Case(), without("optimizer", "/step")),
        (HALF, without("optimizer", "momentum_buffer")),
        (SCALED, without_numbers("optimizer")),
        (SCALED, without_numbers("scaler")),
        (Case(), with_position(step=2)),
        (HALF, without_best),
    ],
)
def test_leaving_out_any_one_saved_item_is_noticed(tmp_path: Path, case: Case, spoil: Spoil) -> None:
    """The tests above would be worth nothing if they passed without what is saved."""
    expected = reference(case, tmp_path)
    directory = tmp_path / "run"
    shutil.copytree(killed(case, tmp_path), directory)
    assert in_a_child(lambda: run(directory, case, spoil=spoil)) == 0
    assert result(directory) != expected


def test_saving_changes_nothing(tmp_path: Path) -> None:
    often = reference(Case(every=1, keep=1), tmp_path)
    assert often["files"] == reference(Case(), tmp_path)["files"]
    assert often["rows"] == reference(Case(), tmp_path)["rows"]


def torn(case: Case, directory: Path, expected: dict[str, Any], deadly: int) -> bool:
    """Kill a run at one of its calls that change the disk, then resume it; False where it has no such call."""
    code = in_a_child(lambda: with_deadly_disk(directory, case, deadly))
    if code == 0:
        return False
    assert code == -signal.SIGKILL
    snapshots = newest_valid_snapshot(directory)
    assert not snapshots.damaged, "what has the name of a snapshot is whole"
    rows = (directory / "metrics.jsonl").read_text().count('"train"')
    saved = 0 if snapshots.newest is None else snapshots.newest.manifest.record["step"]
    assert (
        case.every is not None and rows - saved <= 2 * case.every
    )  # one is being written, the next may be due
    assert in_a_child(lambda: run(directory, case)) == 0
    assert result(directory) == expected
    names = {path.name for path in (directory / "snapshots").iterdir()}
    assert names == {path.name for path in snapshot_paths(directory)}, "nothing half-written is left"
    return True


def test_a_save_may_be_killed_at_any_write_fsync_or_rename(tmp_path: Path) -> None:
    """The second save and the removal of an old snapshot after it: calls 18 to 45 of the run."""
    case = Case(keep=1)
    expected = reference(case, tmp_path)
    for deadly in range(18, 45, 4):
        assert torn(case, tmp_path / str(deadly), expected, deadly)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_call_of_a_run_that_changes_the_disk_may_be_its_last(tmp_path: Path) -> None:
    case = Case(keep=1)
    expected = reference(case, tmp_path)
    count = 0
    while torn(case, tmp_path / str(count), expected, count):
        count += 1
    assert count > 60


def killed_at_random(directory: Path, case: Case, chance: random.Random, longest: float) -> Iterator[int]:
    """Restart the run repeatedly, killing it after a while, until it completes."""
    while True:
        child = os.fork()
        if child == 0:
            try:
                run(directory, case)
            finally:
                os._exit(0)
        until = time.monotonic() + chance.uniform(0, longest)
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.001)
        yield os.waitstatus_to_exitcode(ended[1])
        if os.waitstatus_to_exitcode(ended[1]) == 0:
            return


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_a_run_may_be_killed_at_any_time_again_and_again(tmp_path: Path, kills: int) -> None:
    case = replace(Case(), every=1)
    expected = reference(case, tmp_path)
    chance, killed, attempt = random.Random(7), 0, 0
    while killed < kills and attempt < 40 * kills:
        directory = tmp_path / str(attempt)
        attempt += 1
        for code in killed_at_random(directory, case, chance, longest=0.4):
            killed += code == -signal.SIGKILL
            snapshots = newest_valid_snapshot(directory)
            assert not snapshots.damaged
        assert result(directory) == expected
    assert killed >= kills


def stopped(directory: Path, case: Case, **when: Any) -> Callable[[], None]:
    """A run that is asked to stop, and what is left of it then."""

    def work() -> None:
        with pytest.raises(forked_run.StopRequested):
            run(directory, case, **when)
        assert not multiprocessing.active_children(), "no data worker survives"
        assert not [
            thread.name for thread in threading.enumerate() if thread.name.startswith("gpipe-snapshot")
        ]

    return work


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_evaluation", [False, True])
def test_a_request_to_stop_saves_the_step_under_way_and_the_run_goes_on_to_the_bit(
    tmp_path: Path, workers: int, in_evaluation: bool
) -> None:
    """At fact 3 an epoch's last step is done. Its evaluation is left, or left to be repeated, for the resumed run."""
    case = Case(every=None, workers=workers)
    expected = reference(case, tmp_path)
    directory = tmp_path / "run"

    def ask() -> None:
        signal.raise_signal(signal.SIGTERM)

    first = iter([ask])  # one request: a second one would not wait for a boundary
    when = (
        {"in_evaluation": lambda: next(first, int)()}
        if in_evaluation
        else {"at_fact": lambda now: ask() if now == 3 else None}
    )
    assert in_a_child(stopped(directory, case, **when)) == 0
    newest = newest_valid_snapshot(directory).newest
    assert newest is not None
    assert (newest.manifest.record["step"], newest.manifest.record["evaluation"]) == (4, None)
    assert in_a_child(lambda: run(directory, case)) == 0
    assert result(directory) == expected
