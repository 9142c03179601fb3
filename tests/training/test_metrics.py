"""Lines on a disk that takes nothing, or half a line, arrive later, in order, never torn; a resume cuts rows back."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import ResourceError, RunError
from gpipe_cli.safe_files import UnsafeFile
from gpipe_cli.training import metrics
from gpipe_cli.training.loop import EvalResult, Position
from gpipe_cli.training.metrics import (
    MAX_ROW_BYTES,
    LineFile,
    MetricsFile,
    metrics_length_at,
    truncate_metrics,
)


class Disk:
    """A stand-in for `os` whose disk has room for a limited number of bytes."""

    def __init__(self, room: int, number: int = errno.ENOSPC) -> None:
        self.room, self.number = room, number

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, content: Any) -> int:
        if self.room == 0:
            raise OSError(self.number, os.strerror(self.number))
        taken = os.write(descriptor, bytes(content)[: self.room])
        self.room -= taken
        return taken

    def fsync(self, descriptor: int) -> None:
        if self.room == 0:
            raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Disk]:
    def install(room: int, number: int = errno.ENOSPC) -> Disk:
        made = Disk(room, number)
        monkeypatch.setattr(metrics, "os", made)
        return made

    return install


@given(
    st.lists(st.tuples(st.text(st.characters(exclude_characters="\n"), max_size=5), st.integers(0, 9))),
    st.booleans(),
)
def test_whatever_room_there_is_no_line_is_torn_lost_or_out_of_order(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, int]], ends_well: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    disk = Disk(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "os", disk)
        file = LineFile(path)
        for line, disk.room in writes:
            file.write(f"{line}\n")
        disk.room = 10**6 if ends_well else disk.room
        file.close()
    lines = [f"{line}\n".encode("utf-8", "backslashreplace") for line, _ in writes]
    written = len(lines) - file.lost
    assert path.read_bytes() == b"".join(lines[:written])
    assert not ends_well or (file.lost, file.trouble) == (0, None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_trouble_is_told_while_it_lasts(tmp_path: Path, disk: Callable[..., Disk], number: int) -> None:
    full = disk(5, number)
    file = LineFile(tmp_path / "file")
    file.write("first\n")
    assert file.trouble is not None and file.trouble.errno == number
    file.sync()
    assert file.trouble is not None
    full.room = 100
    file.write("second\n")
    assert file.trouble is None
    file.close()
    assert (tmp_path / "file").read_text() == "first\nsecond\n"


def test_what_waits_has_a_limit(
    tmp_path: Path, disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_WAITING_BYTES", 10)
    full = disk(0)
    file = LineFile(tmp_path / "file")
    for line in ("1234\n", "5678\n", "lost\n", "lost\n"):
        file.write(line)
    full.room = 100
    file.write("last\n")
    file.close()
    assert file.lost == 2
    assert (tmp_path / "file").read_text() == "1234\n5678\nlast\n"


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_lines_go_to_no_other_file(tmp_path: Path, link: str) -> None:
    """train.log -> victim was appended to."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    getattr(tmp_path / "train.log", link)(victim)
    with pytest.raises(RunError, match=r"train.log: is a .*link"):
        LineFile(tmp_path / "train.log")
    (tmp_path / "logs").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(RunError, match="'logs' is a symbolic link, not a directory"):
        LineFile(tmp_path / "logs" / "rank-1.log", tmp_path)
    assert victim.read_text() == "precious" and not (tmp_path / "rank-1.log").exists()


def test_a_file_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"nowhere/file: cannot be written: .*No such file"):
        LineFile(tmp_path / "nowhere" / "file")


def test_every_row_is_on_disk_at_once_and_a_file_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 1, "loss": 1 / 3})
        assert json.loads(path.read_text()) == {"step": 1, "loss": 1 / 3}
    with MetricsFile(path) as file:
        file.write({"step": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


EVALUATED = EvalResult(step=4, epoch=0, loss=1.0, means={}, samples=1, lr=0.1, took=1.0, seconds=2.0)
ROWS = [
    *({"step": step, "split": "train"} for step in range(1, 5)),
    {"step": 4, "split": "eval"},
    *({"step": step, "split": "train"} for step in range(5, 8)),
]


@pytest.mark.parametrize(
    ("position", "remaining"),
    [
        (Position(), 0),
        (Position(3), 3),
        (Position(4), 4),
        (Position(4, evaluation=EVALUATED), 5),
        (Position(6, evaluation=EVALUATED), 7),
        (Position(99, evaluation=EVALUATED), 8),
        (Position(7, evaluation=replace(EVALUATED, step=7)), 8),
    ],
)
@pytest.mark.parametrize(
    "tail", ["", '{"step": 3, "split": "tr', "\0\0\0", '\0\0": 3}\n{"step": 99, "split": "eval"}\n']
)
def test_rows_after_the_position_and_torn_ones_are_cut(
    tmp_path: Path, position: Position, remaining: int, tail: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS) + tail)
    truncate_metrics(path, metrics_length_at(path, position))
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS[:remaining]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[1]",
        "nonsense",
        '{"step": "x", "split": "train"}',
        '{"step": 1e999, "split": "train"}',
        '{"step": -1, "split": "train"}',
        '{"step": NaN, "split": "train"}',
        '{"step": true, "split": "train"}',
        f'{{"step": {10**400}, "split": "train"}}',
        f'{{"step": 1, "split": "train", "loss": {"[" * 40 + "]" * 40}}}',
        "[" * 10**5,
        '"' + "x" * MAX_ROW_BYTES + '"',
    ],
)
@pytest.mark.parametrize("place", [0, 3, len(ROWS)])
def test_a_line_that_was_never_a_row_is_told_before_any_row_is_lost(
    tmp_path: Path, line: str, place: int
) -> None:
    """`step: 1e999` ended in an OverflowError; any other such line took every row after it along, in silence."""
    lines = [json.dumps(row) for row in ROWS]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{text}\n" for text in [*lines[:place], line, *lines[place:]]))
    before = path.read_bytes()
    with pytest.raises(
        RunError, match=rf"metrics.jsonl: line {place + 1} is not a row of metrics: .*repair it"
    ):
        metrics_length_at(path, Position(99))
    assert path.read_bytes() == before


@pytest.mark.parametrize("torn", ["\0\0\0\n", "\0"])
def test_a_torn_line_among_rows_that_are_kept_is_told(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(torn + "".join(f"{json.dumps(row)}\n" for row in ROWS))
    with pytest.raises(RunError, match="line 1 is not a row of metrics: it is cut short"):
        metrics_length_at(path, Position(99))


def test_rows_are_cut_from_no_other_file(tmp_path: Path) -> None:
    """metrics.jsonl -> victim was cut to nothing, and written to."""
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    path = tmp_path / "metrics.jsonl"
    for link in (path.symlink_to, path.hardlink_to):
        link(victim)
        with pytest.raises(UnsafeFile, match="link"):
            truncate_metrics(path, 0)
        path.unlink()
    assert victim.read_text() == "precious\n"


def test_a_run_that_wrote_nothing_has_nothing_to_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate_metrics(path, metrics_length_at(path, Position(3)))
    assert not list(tmp_path.iterdir())
