"""What a rank leaves behind: the reason, as torchrun itself reads it, and the exit code of a launch script."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gpipe_cli import cli
from gpipe_cli.errors import ConfigError, DataError, PeerError, PeerRaised, Stopped
from gpipe_cli.launch.rank import EXIT_CODE_FILE, is_main_process, leave_exit_code, leave_reason


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, reason: Path | str) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": str(rank),
        "TORCHELASTIC_ERROR_FILE": str(reason),
    }.items():
        monkeypatch.setenv(name, value)


def test_torchrun_shows_the_line_of_the_rank_that_failed_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the same second as a rank before it, which has only lost its peer."""
    for rank, line in enumerate(("another rank is gone", "gpipe: error: broken")):
        as_rank(monkeypatch, rank, tmp_path / f"{rank}.json")
        leave_reason(line, of_another=rank == 0)
    failures = {rank: ProcessFailure(rank, 1, 7 - rank, str(tmp_path / f"{rank}.json")) for rank in (0, 1)}
    message = str(ChildFailedError("gpipe", failures))
    assert "traceback : gpipe: error: broken" in message.partition("Root Cause")[2]


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for rank in (0, 1):
        as_rank(monkeypatch, rank, "")
        answers.append(is_main_process())
        leave_reason("torchrun may not ask for it", of_another=False)
    assert answers == [True, False]


def test_without_torchrun_nothing_is_left_and_every_process_speaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Others give ranks by these variables too, Slurm's own launcher among them."""
    as_rank(monkeypatch, 1, tmp_path / "reason.json")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    leave_reason("broken", of_another=False)
    assert is_main_process() and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([DataError("x")], "3"),
        ([ValueError("x"), PeerRaised("rank 1: ValueError")], "1"),
        ([PeerError("another rank is gone"), ConfigError("x"), Stopped("by torchrun")], "2"),
        ([KeyboardInterrupt()], "130"),
    ],
)
def test_of_several_ranks_the_first_error_counts_unless_it_is_the_loss_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[BaseException], code: str
) -> None:
    monkeypatch.setenv(EXIT_CODE_FILE, str(tmp_path / "code"))
    for error in errors:
        leave_exit_code(error)
    assert (tmp_path / "code").read_text() == code


def test_a_script_that_names_no_file_or_one_that_cannot_be_written_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_exit_code(DataError("x"))
    monkeypatch.setenv(EXIT_CODE_FILE, str(tmp_path / "missing" / "code"))
    leave_exit_code(DataError("x"))
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_command_line_leaves_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors before there was a run directory made a Slurm job exit with 1."""
    monkeypatch.setenv(EXIT_CODE_FILE, str(tmp_path / "code"))
    assert cli.main(["train", "balance=manual", "balance.layers=[1,x]"]) == 2
    assert (tmp_path / "code").read_text() == "2"


def test_time_limit_counts_from_the_start_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpipe's clock started with the ranks, so at short limits Slurm's signal came before gpipe's own stop."""
    monkeypatch.setattr(cli.time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(cli.time, "time", lambda: 1763460045.0)
    for start, began in (("1763460000", 955.0), ("1763460100", 1000.0), ("", 1000.0)):
        monkeypatch.setenv("GPIPE_JOB_START", start)
        assert cli._job_start() == began
