"""torchrun's own reading of what a rank leaves for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gpipe_cli.launch.rank import is_main_process, leave_reason


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
