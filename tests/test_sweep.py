"""Sweeps: what the same line skips, resumes and runs, with which launcher, how they stop, and what they print."""

from __future__ import annotations

import json
import logging
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from joblib.externals import loky

from gpipe_cli.accelerator import devices
from tests.support.command_line import Gpipe
from tests.support.user_models import TINY, TINY_TRAINING

SWEEP = ("train", "-m", "epochs=1", "seed=1,2")
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
SIGNALS = """
import os, signal
from pathlib import Path

from torch import nn

from tiny_for_tests import build as tiny


def build(num_classes: int) -> nn.Sequential:
    return nn.Sequential(Signals(), *tiny(num_classes))


class Signals(nn.Module):
    def forward(self, input):
        if Path("signal").exists() and any(Path("parts").glob("seed-2-*/snapshots/step-00000001")):
            number = int(Path("signal").read_text())
            Path("signal").unlink()
            os.kill(os.getpid(), number)
        return input
"""
SIGNALLED = (
    "model._target_=signals_for_tests.build",
    "allow=[signals_for_tests,tiny_for_tests]",
    "snapshot.keep=9",
    "snapshot.every=1",
    "threads=1",
)


@pytest.fixture(autouse=True)
def without_idle_workers() -> Iterator[None]:
    """joblib keeps its workers for the next sweep; a later test would find children that are not its own."""
    yield
    if "joblib" in sys.modules:
        loky.get_reusable_executor().shutdown(wait=True, kill_workers=True)


def weights(sweep: Path) -> dict[str, bytes]:
    """The trained weights of each job, by the name of its directory."""
    return {path.parts[-4]: path.read_bytes() for path in sweep.glob("*/snapshots/step-*/model.safetensors")}


def only_sweep(folder: Path) -> Path:
    (sweep,) = (folder / "runs" / "sweep").glob("*/*")
    return sweep


def test_a_sweep_prints_one_table_and_no_result_twice(tiny: Gpipe, tmp_path: Path) -> None:
    answer = tiny("train", "-m", "steps=1", "chunks=1,2")
    assert answer.out.splitlines()[0] == "2 jobs, 0 failed"
    assert [line.split()[:2] for line in answer.out.splitlines()[2:4]] == [
        ["0", "chunks=1"],
        ["1", "chunks=2"],
    ]
    assert "[HYDRA]" not in answer.err
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "tiny_for_tests.py", "__pycache__"}
    assert only_sweep(tmp_path).parts[-3:-1] == ("sweep", "build")


def test_a_failure_in_a_sweep_is_reported_with_its_type_and_place(tiny: Gpipe) -> None:
    answer = tiny("train", "-m", "model._target_=tiny_for_tests.broken", "steps=1", "seed=1,2")
    assert answer.code == 1
    for line in answer.out.splitlines()[2:4]:
        assert "FAILED (1): ZeroDivisionError: as [31mwritten (in partition 1, layer '2'" in line
    assert "Traceback" not in answer.err and "Error executing job" not in answer.err
    *_, resume = answer.out.splitlines()
    assert resume.startswith("resume   gpipe train ") and resume.endswith(" steps=1 seed=1,2")
    debugged = tiny("train", "-m", "model._target_=tiny_for_tests.broken", "steps=1", "seed=1", "--debug")
    assert "Traceback" in debugged.err


@pytest.mark.slow
def test_the_same_line_skips_jobs_that_have_finished_and_runs_the_others(tiny: Gpipe, tmp_path: Path) -> None:
    first = tiny(*SWEEP)
    sweep = only_sweep(tmp_path)
    before = weights(sweep)
    (second,) = sweep.glob("seed-2-*")
    for path in sorted(second.rglob("*"), reverse=True):  # as if the second job had never started
        path.rmdir() if path.is_dir() else path.unlink()
    again = tiny(*SWEEP)
    assert (first.code, again.code) == (0, 0)
    assert f"resuming the sweep in runs/sweep/build/{sweep.name}" in again.err
    assert "job 0: finished earlier, skipped" in again.err and "job 1: seed=2\n" in again.err
    assert again.out.startswith("2 jobs, 0 failed, 1 finished earlier\n")
    assert weights(only_sweep(tmp_path)) == before
    last = tiny(*SWEEP, "--json")
    assert "all jobs have finished; give hydra.sweep.dir=<new directory> to run them again" in last.err
    assert [job["finished_earlier"] for job in last.json] == [True, True]


def test_ctrl_c_names_the_same_line_which_resumes_to_the_same_bits(tiny: Gpipe, tmp_path: Path) -> None:
    (tmp_path / "signals_for_tests.py").write_text(SIGNALS, encoding="utf-8")
    words = ("train", "-m", "epochs=1", "seed=2,1", *SIGNALLED)
    tiny(*words, "run_dir=whole")
    (tmp_path / "signal").write_text(str(int(signal.SIGINT)))
    stopped = tiny(*words, "run_dir=parts")
    assert stopped.code == 130
    *_, line = stopped.err.splitlines()
    assert line.startswith("gpipe: stopped by Ctrl-C; 0 of 2 jobs have finished; resume with: gpipe train ")
    assert stopped.out.startswith("2 jobs, 0 failed, 1 stopped, 1 not started\n")
    resumed = tiny(*shlex.split(line.partition("resume with: gpipe ")[2]))
    assert resumed.code == 0 and "job 0: seed=2, resuming" in resumed.err
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert len(whole) == 2 and whole == parts


@pytest.mark.slow
def test_a_sweep_never_continues_the_jobs_of_another_line(tiny: Gpipe, tmp_path: Path) -> None:
    tiny(*SWEEP, "run_dir=mine")
    refused = tiny("train", "-m", "epochs=1", "seed=1,3", "run_dir=mine")
    assert refused.code == 2
    assert "mine: has another sweep, which repeats with: gpipe train " in refused.err
    (job,) = (tmp_path / "mine").glob("seed-1-*")
    refused = tiny(*SWEEP, f"run_dir={job}")
    assert refused.code == 2 and "the directory exists and is not empty" in refused.err
    (tmp_path / "mine" / "sweep.json").unlink()
    refused = tiny(*SWEEP, "run_dir=mine")
    assert refused.code == 2 and "run_dir=mine: the directory exists and is not empty" in refused.err
    (tmp_path / "mine" / "sweep.json").write_text("{")
    refused = tiny(*SWEEP, "run_dir=mine")
    assert refused.code == 2 and "(no line, because sweep.json cannot be read)" in refused.err


def test_torchrun_cannot_start_a_sweep(tiny: Gpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    answer = tiny(*SWEEP)
    assert answer.code == 2 and "-m: a sweep starts its runs itself; run it without torchrun" in answer.err


def test_a_file_that_has_changed_makes_another_sweep(tiny: Gpipe, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("clip_grad_norm: 1\n", encoding="utf-8")
    words = ("train", "-m", "steps=1", "config=my.yaml")
    tiny(*words)
    (tmp_path / "my.yaml").write_text("clip_grad_norm: 2\n", encoding="utf-8")
    assert "resuming" not in tiny(*words).err
    assert len(list(tmp_path.glob("runs/sweep/*/*"))) == 2


@pytest.mark.parametrize(
    "row",
    [
        "chunks=2,0 => chunks=0: must be at least 1",
        "schedule=gpipe,nope => schedule=nope: no such option",
        "recipe=digits,nope => recipe=nope: no such option",
        "run_dir=a,b => run_dir: a sweep has one directory",
        "run_dir='' => give the name of a directory",
        "run_dir=a hydra.sweep.dir=b => run_dir and hydra.sweep.dir exclude each other",
        "jobs=2 => unknown key 'jobs'; give hydra/launcher=joblib hydra.launcher.n_jobs=2 to a sweep (-m) instead",
        "optimizer.lr=interval(0.1,1) => optimizer.lr=interval(0.1,1): an interval needs hydra/sweeper=optuna",
        "chunks=int(interval(0,4)) hydra/sweeper=optuna => chunks=0: must be at least 1",
        "hydra/sweeper=optuna --dry-run => hydra/sweeper=optuna: needs a metric",
        "hydra.sweep.dir=a --dry-run => hydra.sweep.dir: has no effect",
        "hydra.sweep.subdir=a => hydra.sweep.subdir: jobs are named after their values",
        "hydra/launcher=nope => hydra/launcher=nope: no such option; pip install 'gpipe-cli[sweeps]'",
        "hydra.launcher.nope=1 => unknown key 'hydra.launcher.nope'; see `gpipe train --cfg hydra`",
        "hydra.searchpath=[a] => hydra.searchpath=[a]: name the folder by --config-dir",
    ],
)
def test_what_a_sweep_cannot_do_is_said_in_one_line_before_anything_is_written(
    tiny: Gpipe, tmp_path: Path, row: str
) -> None:
    line, _, says = row.partition(" => ")
    words = line.split()
    given = {word.partition("=")[0] for word in words}
    sweep = [word for word in SWEEP if word.partition("=")[0] not in given]
    before = set(tmp_path.iterdir())
    answer = tiny(*sweep, *words)
    assert (answer.code, answer.err.count("\n")) == (2, 1) and says in answer.err
    assert set(tmp_path.iterdir()) == before


def test_of_very_many_combinations_each_value_is_judged(
    tiny: Gpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpipe_cli.sweep.MAX_JUDGED", 7)
    before = set(tmp_path.iterdir())
    answer = tiny("train", "-m", "seed=1,2", "chunks=2,4", "batch_size=20,x")
    assert answer.code == 2 and "batch_size=x: expected a whole number" in answer.err
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ((*JOBLIB, "seed=1,2"), True),
        (("hydra/launcher=joblib", "seed=1,2"), True),
        (("hydra/launcher=submitit_local", "seed=1,2"), True),
        ((*JOBLIB, "devices=[0],[1]"), False),
        (("hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "seed=1,2"), False),
        ((*JOBLIB, "seed=1"), False),
    ],
)
def test_jobs_at_the_same_time_do_not_share_an_accelerator(
    tiny: Gpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], refused: bool
) -> None:
    everything = [torch.device("xpu", 0), torch.device("xpu", 1)]
    monkeypatch.setattr(
        devices,
        "available_devices",
        lambda given: everything if given == "auto" else [everything[int(index)] for index in given],
    )
    monkeypatch.setattr("gpipe_cli.sweep._opened", lambda *_: nullcontext(tmp_path))
    monkeypatch.setattr("gpipe_cli.sweep._hydra_main", lambda *_: None)
    answer = tiny("train", "-m", *words)
    assert ("several jobs at once would train on xpu:0" in answer.err) is refused
    assert (answer.code == 2) is refused


def test_the_table_names_the_best_job_and_the_command_that_compares_them(tiny: Gpipe, tmp_path: Path) -> None:
    words = ("train", "-m", "epochs=1", "optimizer=sgd", "optimizer.lr=1e-9,0.1", "snapshot.monitor=loss")
    answer = tiny(*words, "run_dir=sweep")
    jobs = sorted((tmp_path / "sweep").glob("optimizer*"), reverse=True)
    rows = [json.loads(line) for job in jobs for line in (job / "metrics.jsonl").read_text().splitlines()]
    best = min(row["loss"] for row in rows if row["split"] == "eval")
    *_, named, compare = answer.out.splitlines()
    assert named == f"best     job 1: optimizer.lr=0.1 (loss {best:.4g})"
    assert compare == "compare  gpipe report sweep"
    assert tiny(*compare.split()[2:]).code == 0 and (tmp_path / "sweep" / "comparison.html").exists()
    assert [job["best"] for job in tiny(*words, "run_dir=sweep", "--json").json] == [False, True]


def test_the_time_limit_counts_for_the_whole_sweep(tiny: Gpipe) -> None:
    stopped = tiny(*SWEEP, "time_limit=0.001s")
    assert stopped.code == 75
    assert "stopped by time_limit=0.001s; 0 of 2 jobs have finished; resume with: gpipe " in stopped.err
    assert "job 1: seed=2" not in stopped.err


@pytest.fixture
def logging_restored() -> Iterator[None]:
    before = logging.root.handlers[:], logging.root.level
    yield
    for handler in logging.root.handlers:
        if handler not in before[0]:
            handler.close()
    logging.root.handlers[:], logging.root.level = before


@pytest.mark.usefixtures("logging_restored")
def test_hydra_writes_logs_and_its_own_files_and_changes_the_folder_only_if_told_to(
    tiny: Gpipe, tmp_path: Path
) -> None:
    asked = ("hydra.output_subdir=.hydra", "hydra/job_logging=default", "hydra.job.chdir=true")
    assert tiny("train", "steps=1", "hydra.run.dir=one", *asked).code == 0
    assert {".hydra", "gpipe.log", "summary.json"} <= {path.name for path in (tmp_path / "one").iterdir()}
    assert tiny("train", "-m", "steps=1", "hydra.sweep.dir=${now:%Y}", *asked).code == 0
    (job,) = tmp_path.glob("2*/job-*")
    assert {".hydra", "gpipe.log", "summary.json"} <= {path.name for path in job.iterdir()}
    assert Path.cwd() == tmp_path


def test_an_error_of_a_job_with_keys_of_hydra_is_one_line(tiny: Gpipe) -> None:
    answer = tiny("train", "model._target_=tiny_for_tests.broken", "steps=1", "hydra.verbose=false")
    *_, line = answer.err.splitlines()
    assert answer.code == 1 and line.startswith("gpipe: error: ZeroDivisionError: as ")
    assert "Error executing job" not in answer.err


def test_commands_without_directories_sweep_too(tiny: Gpipe, tmp_path: Path) -> None:
    answer = tiny("balance", "-m", "partitions=2,3", "balance=uniform", "--json")
    assert [job["exit_code"] for job in answer.json] == [0, 0] and not (tmp_path / "runs").exists()


def test_optuna_searches_an_interval_and_the_same_line_asks_for_the_same_trials(
    tiny: Gpipe, tmp_path: Path
) -> None:
    words = (
        "train",
        "-m",
        "steps=1",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=6",
        "optimizer.lr=tag(log,interval(1e-4,1e-1))",
        "chunks=choice(2,4)",
    )
    answer = tiny(*words, "--json")
    assert answer.code == 0 and len(answer.json) == 6 and "study" not in answer.err
    swept = [dict(word.split("=") for word in job["overrides"][-2:]) for job in answer.json]
    assert all(1e-4 <= float(job["optimizer.lr"]) <= 1e-1 and job["chunks"] in "24" for job in swept)
    best = next(job for job in answer.json if job["best"])
    found = (only_sweep(tmp_path) / "optimization_results.yaml").read_text()
    assert f"best_value: {best['loss']}" in found
    # More trials extend the sweep.
    more = tiny(*(word.replace("n_trials=6", "n_trials=7") for word in words), "--json")
    assert [job["finished_earlier"] for job in more.json] == [True] * 6 + [False]


@pytest.mark.parametrize(("monitor", "direction"), [("loss", "minimize"), ("top1", "maximize")])
def test_the_metric_decides_what_optuna_is_told(
    tiny: Gpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, monitor: str, direction: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr("gpipe_cli.sweep._opened", lambda *_: nullcontext(tmp_path))
    monkeypatch.setattr("gpipe_cli.sweep._hydra_main", lambda command, task, words: told.extend(words))
    tiny("train", "-m", "seed=1", f"snapshot.monitor={monitor}", "hydra/sweeper=optuna")
    assert f"hydra.sweeper.direction={direction}" in told and "hydra.sweeper.sampler.seed=1" in told


def test_optuna_goes_on_after_a_failure(tiny: Gpipe) -> None:
    words = (
        "seed=1,2",
        "model._target_=tiny_for_tests.broken",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
    )
    answer = tiny("train", "-m", "steps=1", *words, "--json")
    assert answer.code == 1 and [job["exit_code"] for job in answer.json] == [1, 1]
    assert "Failed experiment" not in answer.err and "Traceback" not in answer.err
    assert answer.err.endswith("the sweeper ended with: ValueError: No trials are completed yet.\n")


def test_jobs_of_joblib_equal_those_one_after_the_other(tiny: Gpipe, tmp_path: Path) -> None:
    words = ("train", "-m", "steps=1", "seed=1,2,3")
    assert tiny(*words, "run_dir=row").code == 0
    answer = tiny(*words, *JOBLIB, "run_dir=side", "--json")
    assert answer.code == 0 and [job["job"] for job in answer.json] == [0, 1, 2]
    row, side = weights(tmp_path / "row"), weights(tmp_path / "side")
    assert len(row) == 3 and row == side


@pytest.mark.slow
def test_a_job_that_fails_beside_others_is_reported_and_the_others_finish(tiny: Gpipe) -> None:
    target = "model._target_=tiny_for_tests.broken,tiny_for_tests.build"
    answer = tiny("train", "-m", target, "steps=1", *JOBLIB, "--json")
    broken, build = answer.json
    assert answer.code == broken["exit_code"] == 1
    assert broken["error"].startswith("FAILED (1): ZeroDivisionError: as [31mwritten (in partition 1")
    assert build["exit_code"] == 0


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "tiny_for_tests.py").write_text(TINY, encoding="utf-8")
    (folder / "signals_for_tests.py").write_text(SIGNALS, encoding="utf-8")
    given = {word.partition("=")[0] for word in words}
    base = [word for word in TINY_TRAINING if word.partition("=")[0] not in given]
    return subprocess.Popen(
        [sys.executable, "-m", "gpipe_cli", "train", "-m", *base, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        start_new_session=True,
    )


def wait_until_both_print(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    running: set[str] = set()
    while running != {"job 0", "job 1"}:
        line = process.stderr.readline()
        assert line, "it has ended"
        running |= {line[:5]} if text in line else set()


@pytest.mark.slow
def test_a_sweep_that_is_killed_resumes_with_another_launcher_to_the_same_bits(
    tiny: Gpipe, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    (tmp_path / "signal").write_text(str(int(signal.SIGKILL)))
    words = ("epochs=1", "seed=1,2,3", *SIGNALLED, "hydra/launcher=basic")
    started.append(start(tmp_path, *words, "run_dir=parts"))
    out, _ = started[0].communicate(timeout=120)
    assert started[0].returncode == -signal.SIGKILL and not out
    assert len(list((tmp_path / "parts").glob("seed-*"))) == 2
    resumed = tiny("train", "-m", *words[:-1], "hydra/launcher=submitit_local", "run_dir=parts", "--json")
    assert resumed.code == 0, resumed.err
    assert [job["finished_earlier"] for job in resumed.json] == [True, False, False]
    (job,) = (tmp_path / "parts").glob("seed-2-*")
    assert len(json.loads((job / "launch.json").read_text())["commands"]) == 1
    assert "resuming from" in (job / "train.log").read_text()
    tiny("train", "-m", *words, "run_dir=whole")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert len(whole) == 3 and whole == parts


@pytest.mark.slow
@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_jobs_of_joblib(
    tmp_path: Path, started: list[subprocess.Popen[str]], group: bool, number: signal.Signals
) -> None:
    process = start(tmp_path, "steps=1000000", "seed=1,2", *JOBLIB, "run_dir=sweep")
    started.append(process)
    wait_until_both_print(process, ": step ")
    # A terminal signals the whole foreground group, a user who names a process only that one.
    (os.killpg if group else os.kill)(process.pid, number)
    out, error = process.communicate(timeout=120)
    by_keyboard = number == signal.SIGINT
    assert process.returncode == (130 if by_keyboard else 75) and "Traceback" not in error
    assert out.startswith("2 jobs, 0 failed, 2 stopped\n")
    *_, line = error.splitlines()
    assert line.startswith(
        f"gpipe: stopped by {'Ctrl-C' if by_keyboard else 'SIGTERM'}; 0 of 2 jobs have finished; "
        "resume with: gpipe train -m "
    )
    assert all(any((job / "snapshots").iterdir()) for job in (tmp_path / "sweep").glob("seed-*"))


@pytest.mark.slow
def test_ctrl_c_saves_the_jobs_of_submitit(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    words = (*SIGNALLED, "steps=1000000", "seed=1,2", "hydra/launcher=submitit_local", "run_dir=parts")
    process = start(tmp_path, *words)
    started.append(process)
    metrics: list[Path] = []
    while len(metrics) < 2:
        assert process.poll() is None
        metrics = [path for path in tmp_path.glob("parts/seed-*/metrics.jsonl") if path.stat().st_size]
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in error
    assert out.startswith("2 jobs, 0 failed, 2 stopped\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a killed process")
def test_no_job_of_joblib_outlives_a_sweep_that_is_killed(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    process = start(tmp_path, "steps=1000000", "seed=1,2", *JOBLIB, "snapshot.every=20", "data.workers=1")
    started.append(process)
    wait_until_both_print(process, ": step 40/")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ends = [os.pidfd_open(int(child)) for child in children]
    assert len(ends) >= 2
    process.kill()
    for end in ends:
        assert select.select([end], [], [], 60)[0], "it has outlived the sweep"
        os.close(end)
