"""Sweeps: what the same line skips, resumes and runs, how they stop, and what they print."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Gpipe = Callable[..., Any]
SWEEP = ("train", "-m", "epochs=1", "seed=1,2")
INTERRUPTED = """
import os, signal
from pathlib import Path

from torch import nn

from tiny_for_tests import build as tiny


def build(num_classes: int) -> nn.Sequential:
    return nn.Sequential(Interrupts(), *tiny(num_classes))


class Interrupts(nn.Module):
    def forward(self, input):
        if Path("interrupt").exists() and Path("parts/0/metrics.jsonl").exists():
            Path("interrupt").unlink()
            os.kill(os.getpid(), signal.SIGINT)
        return input
"""


def weights(sweep: Path) -> dict[str, bytes]:
    """The trained weights of each job."""
    return {path.parts[-4]: path.read_bytes() for path in sweep.glob("*/snapshots/step-*/model.safetensors")}


def only_sweep(folder: Path) -> Path:
    (sweep,) = (folder / "runs" / "sweep").iterdir()
    return sweep


def test_a_sweep_prints_one_table_and_no_result_twice(tiny: Gpipe) -> None:
    answer = tiny("train", "-m", "steps=1", "chunks=1,2")
    assert answer.out.splitlines()[0] == "2 jobs, 0 failed"
    assert [line.split()[:2] for line in answer.out.splitlines()[2:4]] == [
        ["0", "chunks=1"],
        ["1", "chunks=2"],
    ]


def test_a_failure_in_a_sweep_is_reported_with_its_type_and_place(tiny: Gpipe) -> None:
    answer = tiny("train", "-m", "model._target_=tiny_for_tests.broken", "steps=1", "seed=1,2")
    assert answer.code == 1
    for line in answer.out.splitlines()[2:4]:
        assert "FAILED (1): ZeroDivisionError: as [31mwritten (in partition 1, layer '2'" in line
    assert "Traceback" not in answer.err
    debugged = tiny("train", "-m", "model._target_=tiny_for_tests.broken", "steps=1", "seed=1", "--debug")
    assert "Traceback" in debugged.err


@pytest.mark.slow
def test_the_same_line_skips_jobs_that_have_finished_and_runs_the_others(tiny: Gpipe, tmp_path: Path) -> None:
    first = tiny(*SWEEP)
    sweep = only_sweep(tmp_path)
    before = weights(sweep)
    for name in ("summary.json", "config.yaml"):  # as if the second job had never started
        (sweep / "1" / name).unlink()
    for path in sorted((sweep / "1").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    again = tiny(*SWEEP)
    assert (first.code, again.code) == (0, 0)
    assert f"resuming the sweep in runs/sweep/{sweep.name}" in again.err
    assert "job 0: finished earlier, skipped" in again.err and "job 1: seed=2\n" in again.err
    assert again.out.startswith("2 jobs, 0 failed, 1 finished earlier\n")
    assert weights(only_sweep(tmp_path)) == before
    last = tiny(*SWEEP, "--json")
    assert "all jobs have finished; give run_dir=<new directory> to run them again" in last.err
    assert [job["finished_earlier"] for job in last.json] == [True, True]


def test_ctrl_c_names_the_same_line_which_resumes_to_the_same_bits(tiny: Gpipe, tmp_path: Path) -> None:
    (tmp_path / "interrupted_for_tests.py").write_text(INTERRUPTED, encoding="utf-8")
    target = "model._target_=interrupted_for_tests.build"
    words = (*SWEEP, target, "allow=[interrupted_for_tests,tiny_for_tests]", "snapshot.keep=9")
    tiny(*words, "run_dir=whole")
    (tmp_path / "interrupt").touch()
    stopped = tiny(*words, "run_dir=parts")
    assert stopped.code == 130
    *_, line = stopped.err.splitlines()
    assert line.startswith("gpipe: stopped by Ctrl-C; 0 of 2 jobs have finished; resume with: gpipe train ")
    assert stopped.out.startswith("2 jobs, 0 failed, 1 stopped, 1 not started\n")
    resumed = tiny(*shlex.split(line.partition("resume with: gpipe ")[2]))
    assert resumed.code == 0 and "job 0: seed=1, resuming" in resumed.err
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys() == {"0", "1"} and whole == parts


@pytest.mark.slow
def test_a_sweep_never_continues_the_jobs_of_another_line(tiny: Gpipe, tmp_path: Path) -> None:
    tiny(*SWEEP, "run_dir=mine")
    refused = tiny("train", "-m", "epochs=1", "seed=1,3", "run_dir=mine")
    assert refused.code == 2
    assert "run_dir=mine: has a sweep with other settings, which repeats with: gpipe train " in refused.err
    (tmp_path / "mine" / "sweep.json").unlink()
    refused = tiny(*SWEEP, "run_dir=mine")
    assert refused.code == 2 and "run_dir=mine/0: the directory exists and is not empty" in refused.err
    assert not (tmp_path / "mine" / "sweep.json").exists()
    refused = tiny(*SWEEP, "run_dir=mine/0")
    assert refused.code == 2 and "run_dir=mine/0: is the directory of a single run" in refused.err
    (tmp_path / "mine" / "sweep.json").write_text("{")
    refused = tiny(*SWEEP, "run_dir=mine")
    assert refused.code == 4 and "mine/sweep.json: cannot be read" in refused.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run_dir=a,b",), "run_dir=a, run_dir=b: a sweep has one directory"),
        (("run_dir=''",), "give the name of a directory"),
        (("jobs=999",), "jobs=999: this machine has"),
        (("jobs=2", "--dry-run"), "jobs=2: only new runs of gpipe train run side by side"),
        (("jobs=2", "resume=mine"), "jobs=2: only new runs of gpipe train run side by side"),
    ],
)
def test_what_a_sweep_cannot_do_is_said_before_anything_is_written(
    tiny: Gpipe, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    answer = tiny(*SWEEP, *words)
    assert answer.code == 2 and says in answer.err
    assert not (tmp_path / "runs").exists() and not (tmp_path / "a").exists()


def test_the_table_names_the_best_job_and_the_command_that_compares_them(tiny: Gpipe, tmp_path: Path) -> None:
    words = ("train", "-m", "seed=1", "optimizer=sgd", "optimizer.lr=1e-9,0.1", "snapshot.monitor=loss")
    answer = tiny(*words, "run_dir=sweep")
    files = [tmp_path / "sweep" / job / "metrics.jsonl" for job in "01"]
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    best = min(row["loss"] for row in rows if row["split"] == "eval")
    *_, named, compare = answer.out.splitlines()
    assert named == f"best     job 1: optimizer.lr=0.1 (loss {best:.4g})"
    assert compare == "compare  gpipe report sweep/0 sweep/1 out=sweep/comparison.html"
    assert tiny(*compare.split()[2:]).code == 0 and (tmp_path / "sweep" / "comparison.html").exists()
    assert [job["best"] for job in tiny(*words, "run_dir=sweep", "--json").json] == [False, True]


def test_the_time_limit_counts_for_the_whole_sweep(tiny: Gpipe) -> None:
    stopped = tiny(*SWEEP, "time_limit=0.001s")
    assert stopped.code == 75
    assert "stopped by time_limit=0.001s; 0 of 2 jobs have finished; resume with: gpipe " in stopped.err
    assert "job 1: seed=2" not in stopped.err


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpipe_cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        start_new_session=True,
    )


LONG = (
    "train",
    "-m",
    "model._target_=tiny_for_tests.build",
    "allow=[tiny_for_tests]",
    "data=synthetic",
    "data.shape=[3,8,8]",
    "data.length=64",
    "batch_size=16",
    "seed=1,2",
    "jobs=2",
    "run_dir=sweep",
)


def wait_until_both_print(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    running: set[str] = set()
    while running != {"job 0", "job 1"}:
        line = process.stderr.readline()
        assert line, "it has ended"
        running |= {line[:5]} if text in line else set()


@pytest.mark.slow
@pytest.mark.parametrize("division", [(), ("engine=single", "threads=1")])
def test_jobs_side_by_side_equal_those_one_after_the_other(
    tiny: Gpipe, tmp_path: Path, division: tuple[str, ...]
) -> None:
    words = ("train", "-m", "seed=1,2,3", *division)
    assert tiny(*words, "run_dir=row").code == 0
    answer = tiny(*words, "run_dir=side", "jobs=2", "--json")
    assert answer.code == 0 and [job["job"] for job in answer.json] == [0, 1, 2]
    row, side = weights(tmp_path / "row"), weights(tmp_path / "side")
    assert row.keys() == {"0", "1", "2"} and row == side


@pytest.mark.slow
def test_a_job_that_fails_beside_others_is_reported_and_the_others_finish(tiny: Gpipe) -> None:
    target = "model._target_=tiny_for_tests.broken,tiny_for_tests.build"
    answer = tiny("train", "-m", target, "steps=1", "jobs=2", "--json")
    broken, build = answer.json
    assert answer.code == broken["exit_code"] == 1
    assert broken["error"].startswith("FAILED (1): ZeroDivisionError: as [31mwritten (in partition 1")
    assert build["exit_code"] == 0 and "job 0 FAILED (1): " in answer.err and "job 1: finished" in answer.err


@pytest.mark.slow
@pytest.mark.parametrize("group", [True, False])
def test_ctrl_c_saves_the_jobs_that_run_side_by_side(
    tiny: Gpipe, tmp_path: Path, started: list[subprocess.Popen[str]], group: bool
) -> None:
    process = start(tmp_path, *LONG, "steps=1000000")
    started.append(process)
    wait_until_both_print(process, ": step ")
    # A terminal signals the whole foreground group, a user who names a process only that one.
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in error
    assert out.startswith("2 jobs, 0 failed, 2 stopped\n")
    *_, line = error.splitlines()
    assert line.startswith(
        "gpipe: stopped by Ctrl-C; 0 of 2 jobs have finished; resume with: gpipe train -m "
    )
    assert all(any((tmp_path / "sweep" / job / "snapshots").iterdir()) for job in "01")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a killed process")
def test_no_job_outlives_a_sweep_that_is_killed(
    tiny: Gpipe, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    process = start(tmp_path, *LONG, "steps=1000000", "snapshot.every=20", "data.workers=1")
    started.append(process)
    wait_until_both_print(process, ": step 40/")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ends = [os.pidfd_open(int(child)) for child in children]
    assert len(ends) == 2
    process.kill()
    for end in ends:
        assert select.select([end], [], [], 60)[0], "it has outlived the sweep"
        os.close(end)
