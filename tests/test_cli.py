"""The console script as a process of its own: exit codes, streams, signals, and what is imported."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

import gpipe_cli
from gpipe_cli import __version__
from gpipe_cli.cli import main

ROOT = str(Path(gpipe_cli.__file__).parents[1])
GPIPE = [sys.executable, "-m", "gpipe_cli"]
MODELS = """
import os
import sys

from torch import nn


class Raise(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, input):
        raise self.error


class Print(nn.Module):
    def forward(self, input):
        sys.stdout.write("a layer runs\\\\n")
        sys.stdout.flush()
        return input


def prints(num_classes: int):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes), Print())


def exits(num_classes: int):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes), Raise(SystemExit(0)))
""".replace("\\\\n", "\\n")
SMALL = ("allow=[own]", "data=synthetic", "data.shape=[3,8,8]", "data.length=64", "chunks=2", "threads=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(MODELS, encoding="utf-8")
    return tmp_path


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ROOT, **variables}


def gpipe(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GPIPE, *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**variables),
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("lines", "not_imported", "codes"),
    [
        (
            ["--help", "ls", "ls models", "--version", "train --help"],
            {"torch", "hydra", "omegaconf", "rich"},
            0,
        ),
        (["train --cfg job", "trian"], {"torch", "torchvision"}, 2),
        (["train resume=nowhere", "train model.weights=nowhere.pth", "eval run=nowhere"], {"torch"}, 12),
        (["train data=text data.path=nowhere", "train -m data=image_folder data.root=a,b"], {"torch"}, 6),
        (["train model=hf model.path=nowhere data=text", "predict run=. input=nowhere"], {"torch"}, 5),
    ],
    ids=["help and lists", "configurations and mistakes", "missing runs", "missing data", "missing models"],
)
def test_what_must_be_quick_imports_little(lines: list[str], not_imported: set[str], codes: int) -> None:
    look = (
        "import sys; from gpipe_cli.cli import main; codes = [main(line.split()) for line in sys.argv[1:]];"
        f"sys.exit(99 if {not_imported} & sys.modules.keys() else sum(codes))"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, *lines], capture_output=True, env=environment(), timeout=60, check=False
    )
    assert done.returncode == codes, done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--version"], 0), (["train", "--version"], 0), (["trian"], 2), (["eval", "run=nowhere"], 4), ([], 0)],
    ids=lambda value: str(value),
)
def test_the_exit_code_is_that_of_the_process(words: list[str], code: int, tmp_path: Path) -> None:
    done = gpipe(*words, cwd=tmp_path)
    assert done.returncode == code
    assert (done.stdout == "") == (code != 0) and (done.stderr == "") == (code == 0)
    if "--version" in words:
        assert done.stdout == f"gpipe {__version__}\n"


@pytest.mark.slow
def test_a_reader_that_goes_early_is_no_error(tmp_path: Path) -> None:
    """`gpipe ls | head -1`: silent, whether we notice while writing or only at the end."""
    for words in (["ls"], ["--help"], ["train", "--cfg", "job"], ["balance", "--by", "params"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [*GPIPE, *words],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
            cwd=tmp_path,
        )
        os.close(writer)
        assert done.stderr == b""
        assert done.returncode in (0, -signal.SIGPIPE)


def test_of_the_ranks_of_torchrun_only_the_first_speaks(tmp_path: Path) -> None:
    """Before they have met, every rank finds the same mistake; torchrun gets the reason from each."""
    ranks = [
        gpipe(
            "trian",
            TORCHELASTIC_RUN_ID="x",
            RANK=str(rank),
            TORCHELASTIC_ERROR_FILE=str(tmp_path / str(rank)),
        )
        for rank in (0, 1)
    ]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "unknown command" in ranks[0].stderr and ranks[1].stderr == ""
    assert all("unknown command" in (tmp_path / str(rank)).read_text() for rank in (0, 1))
    shown = gpipe("--version", TORCHELASTIC_RUN_ID="x", RANK="1")
    assert (shown.returncode, shown.stdout) == (0, "")


def test_a_rank_of_torchrun_ends_without_the_end_of_the_interpreter() -> None:
    """There, a thread of torch.distributed aborted 1 of 12 finished runs on a busy machine."""
    code = (
        "import atexit, os, sys\n"
        "from gpipe_cli.__main__ import script\n"
        "atexit.register(lambda: os.abort())\n"
        "sys.argv = ['gpipe', '--version']\n"
        "script()\n"
    )
    rank = environment() | {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=rank
    )
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.startswith("gpipe ")


@pytest.mark.slow
def test_a_command_runs_with_the_collector_at_work() -> None:
    code = (
        "import gc, sys\n"
        "from gpipe_cli.commands import balance\n"
        "from gpipe_cli.__main__ import script\n"
        "balance.run = lambda *_: sys.exit(f'{gc.isenabled()} {gc.get_freeze_count() > 0}')\n"
        "sys.argv = ['gpipe', 'balance', '--by', 'uniform']\n"
        "script()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment()
    )
    assert "True True" in ended.stderr


def test_debug_shows_the_traceback_and_nothing_else_does(tmp_path: Path) -> None:
    plain, debug = gpipe("train", "chunk=8", cwd=tmp_path), gpipe("train", "chunk=8", "--debug", cwd=tmp_path)
    assert plain.returncode == debug.returncode == 2
    assert "Traceback" not in plain.stderr and "Traceback" in debug.stderr
    assert debug.stderr.splitlines()[-1] == plain.stderr.strip()


def test_a_layer_that_exits_is_a_failure_with_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer that raised SystemExit(0) used to end the whole run with exit code 0 and no message."""
    monkeypatch.chdir(folder)
    # balance=time would run the layer before the run begins.
    for words in (["engine=single"], ["engine=threads", "balance=uniform"]):
        assert main(["train", "model._target_=own.exits", *SMALL, "steps=1", *words, "-m", "--json"]) == 1
        (job,) = json.loads(capsys.readouterr().out)
        assert f"SystemExit: 0 (in partition {len(words) - 1}, layer '2'" in job["error"]
    logs = list(folder.glob("runs/sweep/exits/*/*/train.log"))
    assert len(logs) == 2 and all("SystemExit: 0" in log.read_text() for log in logs)


def until(stream: IO[str] | None, line: str) -> None:
    assert stream is not None
    assert any(line in output for output in stream), f"ended without {line!r}"


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def listens(pid: int) -> bool:
    """Whether a process has a handler of its own for SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for handlers in /proc")
@pytest.mark.slow
def test_signals_while_it_starts_stop_it_in_good_order(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """SIGTERM in the first two seconds used to kill it with 143: nobody listened before torch was imported."""
    process = subprocess.Popen(
        [*GPIPE, "train", "run_dir=run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(),
    )
    started.append(process)
    while not listens(process.pid):
        assert process.poll() is None
        os.sched_yield()
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text(), "it listens before it imports torch"
    for number in [signal.SIGTERM] * 6 + [signal.SIGHUP] * 2:
        process.send_signal(number)
    out, error = process.communicate(timeout=120)
    assert (process.returncode, out) == (75, "")
    assert re.fullmatch(r"gpipe: stopped by SIG(TERM|HUP)\n", error) and not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="terminals are those of Linux")
def test_a_run_whose_terminal_closes_goes_on_without_a_screen(
    folder: Path, started: list[subprocess.Popen[str]]
) -> None:
    """Where no SIGHUP asks it to stop, it trains to its end. The panel used to raise OSError from the dead terminal."""
    leader, follower = pty.openpty()
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [*GPIPE, "train", "model._target_=own.prints", *SMALL, "steps=30", "run_dir=run"],
            stdout=full,
            stderr=follower,
            text=True,
            cwd=folder,
            env=environment(TERM="xterm"),
        )
    started.append(process)
    os.close(follower)
    shown = b""
    while b"samples/s" not in shown:
        shown += os.read(leader, 4096)
    os.close(leader)
    assert process.wait(timeout=120) == 0
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 30


@pytest.mark.skipif(sys.platform != "linux", reason="looks for children in /proc")
@pytest.mark.slow
def test_ctrl_c_ends_a_whole_sweep_and_leaves_no_process(
    folder: Path, started: list[subprocess.Popen[str]]
) -> None:
    # An epoch of a thousand steps: its data workers live until the signal comes.
    small = (word for word in SMALL if word != "data.length=64")
    sweep = ("steps=1000000", "data.length=64000", "data.workers=2", "-m", "seed=1,2")
    process = subprocess.Popen(
        [*GPIPE, "train", "model._target_=own.prints", *small, *sweep],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
        start_new_session=True,
    )
    started.append(process)
    until(process.stderr, "step 1/")
    data_workers = children(process.pid)
    assert data_workers
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    *_, line = error.splitlines()
    assert line.startswith("gpipe: stopped by Ctrl-C; 0 of 2 jobs have finished; resume with: gpipe train ")
    assert line.endswith(" -m seed=1,2")
    assert "Traceback" not in error and "run directory" not in error, "no further job begins"
    assert not any(Path(f"/proc/{pid}").exists() for pid in data_workers)
