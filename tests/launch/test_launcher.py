"""Ranks that only pretend to train: real processes, fast because they import no torch."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpipe_cli import process_lifetime
from gpipe_cli.errors import GpipeError, NumericError, PeerError, PeerRaised, StepTimeout
from gpipe_cli.launch.launcher import Attempt, _Watch, run_ranks
from gpipe_cli.launch.rank_files import Heartbeats, RankFiles, RankTask

IMPORTS = "import tests.launch.acting_rank"
DESCRIPTIONS = ("partition 0", "partition 1")
TASK = RankTask("train", [1, 1])
GRACE = 0.3
STEP_TIMEOUT = 0.4


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def attempt(
    part: str,
    folder: Path,
    step_timeout: float | None = None,
    stop_signal: Callable[[], int | None] = lambda: None,
    imports: str = IMPORTS,
) -> Attempt:
    call = f"tests.launch.acting_rank.main(sys.argv[1], {part!r})"
    ended = run_ranks(TASK, imports, call, DESCRIPTIONS, step_timeout, stop_signal, GRACE)
    assert not processes_of(folder) and not list(folder.iterdir())
    return ended


def processes_of(folder: Path) -> list[int]:
    """The server and the ranks: all that have the folder in their command lines."""
    commands = {int(path.parent.name): command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [process for process, line in commands.items() if f"{folder}/gpipe-ranks-".encode() in line]


def command_line(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""  # it has just ended


def ready_ranks(folder: Path) -> list[int]:
    """The process ids of the ranks, once both are ready; until then nothing."""
    texts = [path.read_text() for path in folder.glob("*/ready-*")]
    return [int(text) for text in texts] if len(texts) == 2 and all(texts) else []


def test_the_summary_of_rank_0_is_returned(folder: Path) -> None:
    ended = attempt("ends well", folder)
    assert ended.cause is None and ended.report is not None and ended.report.summary == {"loss": 0.5}


@pytest.mark.parametrize(
    ("part", "kind", "says"),
    [
        ("is killed", PeerError, r"rank 1 \(partition 1\) was killed by SIGKILL, perhaps because memory"),
        ("exits without a report", PeerError, r"rank 1 \(partition 1\) exited without a report"),
        ("finds nan", NumericError, r"rank 1 \(partition 1\): the loss is nan"),
        ("raises", PeerRaised, r"rank 1 \(partition 1\): ValueError: broken"),
        ("is stopped", StepTimeout, r"rank 1 \(partition 1\): stopped .* within step_timeout=0.4 seconds"),
        (
            "is stopped while it starts",
            StepTimeout,
            r"rank 1 \(partition 1\): stopped .* within step_timeout=0.4",
        ),
        (
            "is stopped between steps",
            StepTimeout,
            r"rank 1 \(partition 1\): stopped .* within step_timeout=0.4",
        ),
        ("waits for ever", StepTimeout, r"rank 0 .* and rank 1 .*: in a step that does not end"),
    ],
)
def test_a_rank_that_fails_ends_all_ranks_and_is_named(
    part: str, kind: type[GpipeError], says: str, folder: Path
) -> None:
    ended = attempt(part, folder, step_timeout=STEP_TIMEOUT if "step" in says else None)
    with pytest.raises(kind, match=says) as raised:
        raise ended.cause or AssertionError
    assert raised.type is kind and ended.is_transient == (kind in (PeerError, StepTimeout))


def test_time_in_which_the_launcher_itself_was_suspended_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z suspends the launcher and all its ranks; `fg` an hour later used to kill them as too slow."""
    files, now = RankFiles(tmp_path), [0.0]
    monkeypatch.setattr(process_lifetime, "time", SimpleNamespace(monotonic=lambda: now[0]))
    server: Any = SimpleNamespace(process_ids=lambda: {0: os.getpid()})
    watch = _Watch(server, files, ["partition 0"], 2.0)
    stalled: list[bool] = []
    with Heartbeats(files.heartbeats, 1).in_step(0):
        for passed in (0.1, 3600, 0.5, 0.6):
            now[0] += passed
            stalled.append(watch._states.verdict(watch._hear({})) is not None)
    assert stalled == [False, False, False, True]


def test_a_signal_to_the_launcher_reaches_every_rank(folder: Path) -> None:
    ended = attempt(
        "obeys a signal", folder, stop_signal=lambda: signal.SIGUSR1 if ready_ranks(folder) else None
    )
    assert ended.cause is None and ended.report is not None and ended.report.message == "stopped"


def test_a_second_ctrl_c_ends_all_ranks_at_once(folder: Path) -> None:
    def interrupt() -> None:
        if ready_ranks(folder):
            raise KeyboardInterrupt

    assert str(attempt("waits for ever", folder, stop_signal=interrupt).cause) == "stopped at once"


def test_a_killed_server_ends_all_ranks_and_is_named(folder: Path) -> None:
    def kill_server() -> None:
        if ranks := ready_ranks(folder):
            for server in set(processes_of(folder)) - set(ranks):
                os.kill(server, signal.SIGKILL)

    ended = attempt("waits for ever", folder, stop_signal=kill_server)
    assert str(ended.cause).startswith("the process that starts the ranks was killed by SIGKILL")
    assert ended.is_transient


def test_a_stopped_server_does_not_keep_the_launcher_waiting(folder: Path) -> None:
    """The launcher learns exit codes from the server, and waited for ever for one that only SIGSTOP held."""
    stopped: list[int] = []

    def stop_server() -> int | None:
        if not stopped and (ranks := ready_ranks(folder)):
            (server,) = set(processes_of(folder)) - set(ranks)
            os.kill(server, signal.SIGSTOP)
            stopped.append(server)
        return signal.SIGUSR1 if stopped else None

    ended = attempt("obeys a signal", folder, stop_signal=stop_server)
    assert stopped and ended.report is not None and ended.report.message == "stopped"


def test_a_server_that_fails_before_it_forks_is_named(folder: Path) -> None:
    ended = attempt("ends well", folder, imports="raise SystemExit(3)")
    assert str(ended.cause) == "the process that starts the ranks ended with exit code 3"
