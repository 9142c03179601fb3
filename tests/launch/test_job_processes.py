"""Processes side by side, with commands that need no torch: how they end is what counts here."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import closing

import pytest
from gpipe_cli.launch.job_processes import JobExit, run_side_by_side

from gpipe_cli.errors import Interrupted
from gpipe_cli.launch import job_processes

WAITING = (
    "import signal, sys; from gpipe_cli.launch.job_processes import prepare_child; import json; "
    "prepare_child(json.loads(sys.argv[1])['parent']); "
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('waits', flush=True); signal.pause()"
)


def run(*lines: Sequence[str], slots: int = 2) -> list[JobExit]:
    exits = run_side_by_side(range(len(lines)), slots, lambda number, slot: lines[number], began=0.0)
    with closing(exits):
        return sorted(exits, key=lambda ended: ended.number)


def test_each_line_of_a_job_has_its_number_and_a_failure_is_reported_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, third = run(["--version"], ["nonsense"], ["train", "chunks=0"])
    assert (first.exit_code, first.message) == (0, "")
    assert second.exit_code == 2 and second.message.startswith("unknown command 'nonsense'; choose one of: ")
    assert third == JobExit(2, 2, "chunks=0: must be at least 1")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("job 0: gpipe ")


def test_a_job_that_is_killed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_processes, "START", "import os; os.kill(os.getpid(), 9)")
    (ended,) = run([])
    assert ended == JobExit(0, 7, "its process was killed by SIGKILL, perhaps because memory ran out")


def test_a_request_to_stop_reaches_the_running_jobs_and_starts_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_processes, "START", WAITING)
    printed: list[str] = []

    def interrupt(line: str) -> None:
        printed.append(line)
        if len(printed) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(job_processes, "print_status", interrupt)
    exits: list[JobExit] = []
    running = run_side_by_side(range(3), 2, lambda number, slot: [], began=0.0)
    with pytest.raises(Interrupted, match="stopped by Ctrl-C"), closing(running):
        exits.extend(running)
    assert sorted(printed) == ["job 0: waits", "job 1: waits"]
    assert {ended.number for ended in exits} == {0, 1} and all(ended.stopped for ended in exits)


def test_an_error_ends_the_jobs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    monkeypatch.setattr(job_processes, "START", start)
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line.split()[-1]))
        raise KeyboardInterrupt

    monkeypatch.setattr(job_processes, "print_status", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run([])
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
