from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.live import Live

from gpipe_cli.commands import runs
from gpipe_cli.runs.directory import lock_run_directory
from gpipe_cli.training.signals import StopNow, StopRequested
from tests.support.command_line import Gpipe

CONFIG = "model:\n  name: x\nsnapshot:\n  every: epoch\n  keep: 3\n  monitor: top1\nresume: null\n"


def make_run(name: str, changed: int, **files: str) -> Path:
    path = Path("runs", name)
    path.mkdir(parents=True)
    for file, text in {"config": CONFIG, "overrides": "[]", **files}.items():
        suffix = {"config": "yaml", "overrides": "yaml", "metrics": "jsonl"}.get(file, "json")
        (path / f"{file}.{suffix}").write_text(text)
        os.utime(path / f"{file}.{suffix}", (changed, changed))
    return path


def metrics(*rows: tuple[int, str, float]) -> str:
    return "".join(
        json.dumps({"step": step, "split": split, "loss": 1 - top1, "top1": top1}) + "\n"
        for step, split, top1 in rows
    )


def test_a_row_has_state_step_last_and_best_metric_and_the_latest_run_comes_last(gpipe: Gpipe) -> None:
    rows = metrics((1, "train", 0.1), (2, "eval", 0.7), (4, "eval", 0.6), (5, "train", 0.5))
    make_run(
        "b", 2000, metrics=rows, launch='{"steps": 8}', outcome='{"state": "failed", "reason": "full disk"}'
    )
    make_run("a", 3000, metrics=rows, summary='{"steps": 5}')
    make_run("c/0", 1000, metrics=metrics((1, "train", 0.25)))
    answer = gpipe("runs", "--json")
    assert answer.code == 0, answer.err
    first, failed, finished = answer.json
    assert (first["run"], first["state"], first["last"], first["train_loss"]) == (
        "runs/c/0",
        "crashed",
        None,
        0.75,
    )
    assert (failed["run"], failed["state"], failed["note"]) == ("runs/b", "failed", "full disk")
    assert (failed["step"], failed["steps"]) == (5, 8)
    assert (failed["metric"], failed["last"], failed["best"], failed["best_step"]) == ("top1", 0.6, 0.7, 2)
    assert (finished["run"], finished["state"], finished["steps"]) == ("runs/a", "finished", 5)
    assert finished["bytes"] == sum(path.stat().st_size for path in Path("runs/a").iterdir())
    header, *lines = gpipe("runs").out.splitlines()[1:]
    assert header.split() == ["run", "state", "step", "last", "best", "age", "size", "note"]
    assert lines[1].split()[:10] == [
        "runs/b",
        "failed",
        "5/8",
        "top1",
        "60.00",
        "%",
        "top1",
        "70.00",
        "%",
        "at",
    ]
    assert lines[0].split()[3:6] == ["train", "loss", "0.75"] and lines[0].split()[2] == "1"


def test_a_run_that_trains_is_running_and_only_training_runs_are_listed(gpipe: Gpipe) -> None:
    make_run("profiled", 1, profile="{}")
    sweep = make_run("sweep/0", 2).parent
    (sweep / "sweep.json").touch()
    (sweep / "run.lock").touch()
    Path("runs", "options").mkdir()
    Path("runs", "options", "config.yaml").touch()
    Path("runs", "again").symlink_to("sweep")
    with lock_run_directory(sweep / "0"):
        (row,) = gpipe("runs", "--json").json
    assert (row["run"], row["state"]) == ("runs/sweep/0", "running")


def test_a_folder_that_is_a_run_or_has_none_is_fine_and_a_missing_one_an_error(gpipe: Gpipe) -> None:
    run = make_run("a", 1)
    assert [row["run"] for row in gpipe("runs", str(run), "--json").json] == ["runs/a"]
    Path("empty").mkdir()
    assert gpipe("runs", "empty", "--json").json == []
    assert f"0 runs in {Path.cwd()}/empty" in gpipe("runs", "empty").out
    answer = gpipe("runs", "nowhere")
    assert answer.code == 4 and "nowhere: no such directory; give the folder of your runs" in answer.err
    assert gpipe("runs", "a", "b").code == 2


def test_runs_below_the_current_folder_are_found_wherever_run_dir_put_them(
    gpipe: Gpipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After README's own `run_dir=mine`, gpipe runs ended with exit code 4."""
    make_run("x", 2)
    Path("runs", "x").rename("mine")
    make_run("../.hidden/a", 1)
    (make_run("../venv/a", 1).parent / "pyvenv.cfg").touch()
    make_run("../deep/er/a", 1)
    assert [row["run"] for row in gpipe("runs", "--json").json] == ["deep/er/a", "mine"]
    monkeypatch.setattr("gpipe_cli.runs.reader.MAX_ENTRIES", 7)
    answer = gpipe("runs", "--json")
    assert [row["run"] for row in answer.json] == ["mine"], "what is near is found first"
    assert "has too many files" in answer.err


def test_the_runs_of_a_sweep_show_what_differs_and_other_runs_do_not(gpipe: Gpipe) -> None:
    for name, lr in (("sw/a", 0.1), ("sw/b", 0.2), ("c", 0.3)):
        make_run(name, 1, config=f"{CONFIG}chunks: 4\noptimizer:\n  lr: {lr}\n")
    Path("runs/sw/sweep.json").write_text("{}")
    differs = {row["run"]: row["differs"] for row in gpipe("runs", "--json").json}
    assert differs == {"runs/sw/a": "lr=0.1", "runs/sw/b": "lr=0.2", "runs/c": ""}
    assert gpipe("runs").out.splitlines()[1].split()[:2] == ["run", "differs"]
    assert "differs" not in gpipe("runs", "runs/c").out


def test_the_lines_that_delete_runs_are_printed_and_work(
    gpipe: Gpipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("large one", 1, summary='{"steps": 5}', metrics="x" * 999)
    make_run("-r", 2, outcome='{"state": "failed", "reason": "full disk"}')
    monkeypatch.chdir("runs")
    lines = dict(line.split(maxsplit=1) for line in gpipe("runs").out.splitlines()[-2:])
    assert lines == {"delete_largest": "rm -r 'large one'", "delete_broken": "rm -r ./-r"}
    for line in lines.values():
        subprocess.run(shlex.split(line), check=True)
    assert gpipe("runs", "--json").json == []


NAMES = (
    *("a b", "a,b", "日本", "x=1", "it's", '"', "${oc.env:HOME}", "a\\", "[a]", "{a}"),
    *("null", "1e3", "~a", "hydra.x"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_may_have_any_name(gpipe: Gpipe, name: str) -> None:
    make_run(name, 1)
    assert [row["run"] for row in gpipe("runs", f"runs/{name}", "--json").json] == [f"runs/{name}"]
    Path("runs", name).rename(name)
    assert [row["run"] for row in gpipe("runs", name, "--json").json] == [name]


def test_runs_and_copies_are_made_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from gpipe_cli.cli import main; assert main(['runs', '.']) == 0; "
        "assert main(['cp', 'model/mlp', 'a.yaml']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60, cwd=tmp_path)


HOSTILE = {
    "metrics.jsonl": (None, "metrics.jsonl: cannot be read: is a named pipe"),
    "summary.json": ("{", "summary.json: damaged"),
    "launch.json": ("[" * 100_000, "launch.json: damaged"),
    "outcome.json": ('{"state": "fine"}', "its state cannot be read: outcome.json is damaged"),
    "run.lock": (None, "its state cannot be read: is a named pipe"),
    "config.yaml": (None, "config.yaml: cannot be read: is a named pipe"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_becomes_a_note_of_its_row(gpipe: Gpipe, name: str) -> None:
    make_run("good", 1)
    content, note = HOSTILE[name]
    path = make_run("bad\x1b[31m", 2) / name
    path.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content)
    rows = {row["run"]: row for row in gpipe("runs", "--json").json}
    assert rows["runs/good"]["note"] == ""
    assert rows["runs/bad\x1b[31m"]["note"].startswith(note)
    assert "\x1b" not in gpipe("runs").out


def test_numbers_that_are_none_and_half_lines_are_left_out(gpipe: Gpipe) -> None:
    rows = ['{"split": "eval", "step": 1e999, "top1": NaN}', 'nonsense "eval"', '["eval"]']
    make_run("a", 1, metrics="\n".join([*rows, '{"split": "eval", "top1": true}', '{"st']))
    (row,) = gpipe("runs", "--json").json
    assert (row["step"], row["last"], row["note"]) == (None, None, "metrics.jsonl: 2 damaged lines")


def test_watching_refreshes_until_ctrl_c_and_needs_a_terminal(
    gpipe: Gpipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("a", 1)
    answer = gpipe("runs", "--watch")
    assert answer.code == 2 and "--watch refreshes a table on a terminal" in answer.err
    assert gpipe("train", "--watch").code == 2
    sleeps = iter([None, KeyboardInterrupt()])

    def sleep(seconds: float) -> None:
        if (stop := next(sleeps)) is not None:
            raise stop

    shown: list[Any] = []
    monkeypatch.setattr(runs.time, "sleep", sleep)
    monkeypatch.setattr(Live, "update", lambda live, table, refresh: shown.append(table))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    answer = gpipe("runs", "--watch")
    assert answer.code == 0 and len(shown) == 2
    sleeps = iter([StopNow(StopRequested("SIGTERM"))])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert gpipe("runs", "--watch").code == 75
