"""Real monitors beside processes that only sleep, without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest

import gpipe_cli
from gpipe_cli.launch.monitor_process import MonitorTask, is_torchrun, task_line
from gpipe_cli.launch.rank_files import ExitReport, Heartbeats, RankFiles
from gpipe_cli.launch.rank_monitor import START

SLEEP = [sys.executable, "-c", "import signal; signal.pause()"]
SECONDS = 60


@final
class Watched:
    """Two ranks, their monitors and two agents, all of which are processes of this machine."""

    def __init__(self, cleanup: ExitStack, restarts_left: int = 0) -> None:
        self._cleanup = cleanup
        self.ranks, self.agents = ([self._start(*SLEEP) for _ in range(2)] for _ in range(2))
        task = MonitorTask(
            rank=0,
            size=2,
            rank_process=self.ranks[0].pid,
            agent_process=self.agents[0].pid,
            restarts_left=restarts_left,
            token="x",
            address="127.0.0.1",
            port=0,
            silence=5.0,
            step_timeout=None,
            prints=True,
        )
        first, started = self._monitor(task)
        pids = {"rank_process": self.ranks[1].pid, "agent_process": self.agents[1].pid}
        second, other = self._monitor(replace(task, rank=1, port=started["port"], **pids))
        self.monitors = [first, second]
        self.files = [RankFiles(Path(each["folder"])) for each in (started, other)]

    def _monitor(self, task: MonitorTask) -> tuple[subprocess.Popen[bytes], Any]:
        monitor = self._start(sys.executable, "-c", START, *sys.path, stdin=subprocess.PIPE)
        assert monitor.stdin is not None and monitor.stdout is not None
        monitor.stdin.write(task_line(task).encode())
        monitor.stdin.close()
        return monitor, json.loads(monitor.stdout.readline())

    def _start(self, *command: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        started = self._cleanup.enter_context(
            subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        self._cleanup.callback(started.kill)
        return started

    def outputs(self) -> list[str]:
        """What the monitors have printed when they have ended."""
        texts = []
        for monitor in self.monitors:
            assert monitor.stdout is not None and monitor.stderr is not None
            monitor.wait(SECONDS)
            texts.append((monitor.stdout.read() + monitor.stderr.read()).decode())
        return texts


@pytest.fixture
def cleanup(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setenv("PYTHONPATH", str(Path(gpipe_cli.__file__).parents[1]))
    with ExitStack() as stack:
        yield stack


def test_a_monitor_imports_no_torch() -> None:
    check = "import sys, gpipe_cli.launch.monitor_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_only_torchrun_is_torchrun() -> None:
    assert not is_torchrun(os.getpid()) and not is_torchrun(2**22 + 1)


def test_monitors_end_with_ranks_that_finish_and_leave_all_processes_alone(cleanup: ExitStack) -> None:
    watched = Watched(cleanup)
    for rank, files in enumerate(watched.files):
        files.write_exit_report(rank, ExitReport(0))
    assert watched.outputs() == ["", ""]
    assert [process.poll() for process in (*watched.ranks, *watched.agents)] == [None] * 4
    assert not any(files.folder.exists() for files in watched.files)


@pytest.mark.slow
@pytest.mark.parametrize("restarts_left", [0, 1])
def test_a_killed_rank_ends_the_other_and_agents_that_do_not_notice(
    cleanup: ExitStack, tmp_path: Path, restarts_left: int
) -> None:
    """An agent with restarts left may stay, unless it leaves its dead rank unreaped; here this test reaps them."""
    watched = Watched(cleanup, restarts_left)
    watched.files[0].write_run_directory(tmp_path)
    watched.files[0].write_descriptions(["partition 0", "partition 1"])
    with Heartbeats(watched.files[0].heartbeats, 2).in_step(0):
        watched.ranks[1].kill()
        assert watched.ranks[1].wait(SECONDS) == -signal.SIGKILL
        assert watched.ranks[0].wait(SECONDS) == -signal.SIGKILL, "it waits for its peer forever"
        first, _ = watched.outputs()
    host = os.uname().nodename
    line = f"rank 1 (partition 1 on {host}): ended without a report: it was killed, perhaps because memory ran out"
    assert f"gpipe: error: {line}\n" in first
    assert f"ERROR the run ends here: {line}\n" in (tmp_path / "train.log").read_text()
    assert json.loads((tmp_path / "outcome.json").read_text())["reason"] == line
    expected = [None, None] if restarts_left else [-signal.SIGKILL] * 2
    assert [agent.poll() for agent in watched.agents] == expected
