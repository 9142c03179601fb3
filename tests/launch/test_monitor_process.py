"""Real monitors beside processes that only sleep, and the connections between monitors; all without torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest

import gpipe_cli
from gpipe_cli.errors import PeerError
from gpipe_cli.launch.monitor_process import (
    MAX_MONITOR_LINE,
    Connection,
    Hub,
    MonitorTask,
    Spoke,
    is_torchrun,
    task_line,
)
from gpipe_cli.launch.rank_files import ExitReport, Heartbeats, RankFiles
from gpipe_cli.launch.rank_monitor import START
from gpipe_cli.launch.rank_states import DIED, RankStates, RankStatus, Surroundings

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


TOKEN = "secret"
FINE = RankStatus()
FINISHED = RankStatus(report=ExitReport(0), ended=DIED)


class Pair:
    """Both ends, in one process."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.hosts = {0: "node0", 1: "?"}
        seen = Surroundings(0, self.hosts, lambda rank: f"on {self.hosts[rank]}")
        states = RankStates(2, silence=10.0, step_timeout=None, surroundings=seen)
        self.hub = Hub(listener, TOKEN, states, self.hosts)
        self.names = {0: "?", 1: "node1"}
        self.spoke = self.connect()

    def connect(self, token: str = TOKEN) -> Spoke:
        connected = socket.create_connection(self.address)
        greeting = {"token": token, "rank": 1, "host": "node1"}
        seen = Surroundings(1, self.names, lambda rank: f"on {self.names[rank]}")
        return Spoke(connected, greeting, 10.0, seen)

    def exchange(self, now: float, status: RankStatus = FINE) -> None:
        self.hub.poll(5, now)  # the connection
        self.hub.poll(5, now)  # the greeting
        self.spoke.beat(status, now)
        self.hub.poll(5, now)
        self.hub.beat(RankStatus(), now)
        self.spoke.poll(5, now)

    def close(self) -> None:
        self.hub.close()  # first: the other end waits for it
        self.spoke.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_both_ends_learn_the_name_of_the_other_host(pair: Pair) -> None:
    pair.exchange(1.0)
    assert pair.hosts == {0: "node0", 1: "node1"} == pair.names
    assert pair.hub.verdict(10.9) is None is pair.spoke.verdict(10.9)


def test_each_end_misses_a_host_that_does_not_answer_for_the_time_of_silence(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.exchange(1.0)
    assert 0 <= pair.spoke._connection.unanswered_seconds() < 60
    monkeypatch.setattr(Connection, "unanswered_seconds", lambda _: 10.5)
    pair.hub.beat(RankStatus(), 11.5)
    assert str(pair.hub.verdict(11.5)).startswith("rank 1 (on node1): not heard of for 10 seconds")
    assert str(pair.spoke.verdict(11.5)).startswith("rank 0 (on node0): not heard of for 10 seconds")
    assert pair.spoke.reached_alone and not pair.hub.reached_alone


def test_a_monitor_that_neither_reads_nor_sends_is_not_lost_while_its_host_answers(pair: Pair) -> None:
    """A stopped monitor ended a healthy run as "its host is down"."""
    pair.exchange(1.0)
    for now in range(2, 200):
        pair.hub.beat(RankStatus(), now)
        assert pair.hub.verdict(now) is None
    for now in range(2, 200):
        pair.spoke.beat(FINE, now)
        assert pair.spoke.verdict(now) is None


def test_the_verdict_of_rank_0_reaches_the_others_with_its_kind(pair: Pair) -> None:
    pair.exchange(1.0, RankStatus(ended=DIED))
    assert pair.hub.verdict(1.0) is not None
    pair.spoke.poll(5, 1.0)
    error = pair.spoke.verdict(1.0)
    assert type(error) is PeerError and "rank 1 (on node1): ended without a report" in str(error)
    assert not pair.spoke.reached_alone


def test_the_end_of_rank_0s_monitor_is_the_end_of_rank_0(pair: Pair) -> None:
    pair.exchange(1.0)
    pair.hub.close()
    pair.spoke.poll(5, 1.0)
    assert str(pair.spoke.verdict(1.0)).startswith("rank 0 (on node0): ended without a report")


@pytest.mark.parametrize(
    "sent",
    [
        json.dumps({"token": "guessed", "rank": 1, "host": "evil"}).encode() + b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"x" * (MAX_MONITOR_LINE + 10),
        b"\xff\xfe\n",
    ],
)
def test_a_stranger_is_disconnected_and_changes_nothing(pair: Pair, sent: bytes) -> None:
    pair.exchange(1.0)
    with socket.create_connection(pair.address) as stranger:
        stranger.sendall(sent)
        stranger.settimeout(5)
        pair.hub.poll(5, 1.0)
        for _ in range(4):
            pair.hub.poll(0.1, 1.0)
        with suppress(ConnectionResetError):  # closed before it had read everything
            assert stranger.recv(100) == b""
    assert pair.hosts[1] == "node1" and pair.hub.verdict(1.0) is None


def test_a_monitor_closes_only_after_rank_0_has_heard_its_last_word(pair: Pair) -> None:
    pair.exchange(1.0)
    pair.spoke.beat(FINISHED, 1.0)
    closing = threading.Thread(target=pair.spoke.close)
    closing.start()
    for _ in range(2):  # the last word, and the end of the connection
        pair.hub.poll(5, 1.0)
    closing.join(5)
    pair.hub.beat(FINISHED, 1.0)
    assert not closing.is_alive() and pair.hub.finished and pair.hub.verdict(1.0) is None


def test_all_have_finished_when_each_says_so(pair: Pair) -> None:
    pair.exchange(1.0, FINISHED)
    assert pair.spoke.finished and not pair.hub.finished
    pair.hub.beat(FINISHED, 1.0)
    assert pair.hub.finished
