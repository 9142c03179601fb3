"""Groups of ranks that only pretend to train: real processes, fast because they import no torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpipe_cli
from gpipe_cli import process_lifetime
from gpipe_cli.errors import GpipeError, NumericError, PeerError, PeerRaised, StepTimeout
from gpipe_cli.launch import supervisor as supervision
from gpipe_cli.launch.heartbeat import Heartbeats
from gpipe_cli.launch.rank_files import ExitReport, RankFiles
from gpipe_cli.launch.rank_group import RankGroup, RanksFailed

RANK = Path(__file__).with_name("acting_rank.py")
DESCRIPTIONS = ("partition 0", "partition 1")


@pytest.fixture(autouse=True)
def same_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(gpipe_cli.__file__).parents[1]))


def run_ranks(
    part: str,
    step_timeout: float | None = None,
    stop_signal: Callable[[RankFiles], int | None] = lambda _: None,
) -> ExitReport:
    created: list[RankFiles] = []

    def arguments(files: RankFiles) -> list[str]:
        created.append(files)
        return [str(RANK), str(files.folder), part]

    try:
        return RankGroup(DESCRIPTIONS, step_timeout, lambda: stop_signal(created[0])).run(arguments)
    finally:
        assert not processes_of(created[0]) and not created[0].folder.exists()


def processes_of(files: RankFiles) -> list[int]:
    """The server and the ranks: all that have the folder in their command lines."""
    commands = {int(path.parent.name): command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [process for process, line in commands.items() if str(files.folder).encode() in line]


def command_line(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""  # it has just ended


def test_the_summary_of_rank_0_is_returned() -> None:
    assert run_ranks("ends well").summary == {"loss": 0.5}


@pytest.mark.parametrize(
    ("part", "kind", "says"),
    [
        ("is killed", PeerError, r"rank 1 \(partition 1\) was killed by SIGKILL, perhaps because memory"),
        ("exits without a report", PeerError, r"rank 1 \(partition 1\) exited without a report"),
        ("finds nan", NumericError, r"rank 1 \(partition 1\): the loss is nan"),
        ("raises", PeerRaised, r"rank 1 \(partition 1\): ValueError: broken"),
        ("is stopped", StepTimeout, r"rank 1 \(partition 1\): stopped .* within step_timeout=0.5 seconds"),
        (
            "is stopped while it starts",
            StepTimeout,
            r"rank 1 \(partition 1\): stopped .* within step_timeout=0.5",
        ),
        (
            "is stopped between steps",
            StepTimeout,
            r"rank 1 \(partition 1\): stopped .* within step_timeout=0.5",
        ),
        ("waits for ever", StepTimeout, r"rank 0 .* and rank 1 .*: in a step that does not end"),
    ],
)
def test_a_rank_that_fails_ends_all_ranks_and_is_named(part: str, kind: type[GpipeError], says: str) -> None:
    with pytest.raises(RanksFailed, match=says) as failed:
        run_ranks(part, step_timeout=0.5 if "step" in says else None)
    assert type(failed.value.cause) is kind
    assert failed.value.is_transient == (kind in (PeerError, StepTimeout))


def test_time_in_which_the_launcher_itself_was_suspended_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z suspends the launcher and all its ranks; `fg` an hour later used to kill them as too slow."""
    files, now = RankFiles(tmp_path), [0.0]
    monkeypatch.setattr(process_lifetime, "time", SimpleNamespace(monotonic=lambda: now[0]))
    supervisor = supervision.Supervisor(files, {0: os.getpid()}, 2.0, lambda: None)
    monkeypatch.setattr(supervisor, "_kill_all", lambda: None)
    stalled: list[bool] = []
    with Heartbeats(files.heartbeats, 1).in_step(0):
        for passed in (0.1, 3600, 0.5, 0.6):
            now[0] += passed
            supervisor._check_heartbeats()
            stalled.append(supervisor.stall is not None)
    assert stalled == [False, False, False, True]


def test_a_signal_to_the_launcher_reaches_every_rank() -> None:
    def stop_signal(files: RankFiles) -> int | None:
        ready = all((files.folder / f"ready-{rank}").exists() for rank in (0, 1))
        return signal.SIGUSR1 if ready else None

    assert run_ranks("obeys a signal", stop_signal=stop_signal).message == "stopped"


def test_a_killed_server_ends_all_ranks_and_is_named() -> None:
    killed: list[int] = []

    def kill_server(files: RankFiles) -> None:
        ready = [files.folder / f"ready-{rank}" for rank in (0, 1)]
        if not killed and all(path.exists() and path.read_text() for path in ready):
            ranks = [int(path.read_text()) for path in ready]
            (server,) = set(processes_of(files)) - set(ranks)
            os.kill(server, signal.SIGKILL)
            killed.append(server)

    with pytest.raises(
        RanksFailed, match=r"^the process that starts the ranks was killed by SIGKILL"
    ) as failed:
        run_ranks("waits for ever", stop_signal=kill_server)
    assert failed.value.is_transient


def test_a_stopped_server_does_not_keep_the_launcher_waiting() -> None:
    """The launcher learns exit codes from the server, and waited for ever for one that only SIGSTOP held."""
    stopped: list[int] = []

    def stop_server(files: RankFiles) -> int | None:
        ready = [files.folder / f"ready-{rank}" for rank in (0, 1)]
        if not stopped and all(path.exists() and path.read_text() for path in ready):
            (server,) = set(processes_of(files)) - {int(path.read_text()) for path in ready}
            os.kill(server, signal.SIGSTOP)
            stopped.append(server)
        return signal.SIGUSR1 if stopped else None

    assert run_ranks("obeys a signal", stop_signal=stop_server).message == "stopped"
    assert stopped


def test_a_server_that_fails_before_it_forks_is_named() -> None:
    with pytest.raises(RanksFailed, match=r"^the process that starts the ranks ended with exit code 3"):
        RankGroup(DESCRIPTIONS).run(lambda _: ["-c", "raise SystemExit(3)"])
