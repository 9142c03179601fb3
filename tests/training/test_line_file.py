"""A disk that takes nothing, or half a line: what was said is in the file later, in order, and never torn."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import ResourceError, RunError
from gpipe_cli.training import line_file
from gpipe_cli.training.line_file import LineFile


class Disk:
    """`os` with a disk that has room for so many bytes more."""

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
        monkeypatch.setattr(line_file, "os", made)
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
        patch.setattr(line_file, "os", disk)
        file = LineFile(path)
        for line, disk.room in writes:
            file.write(f"{line}\n")
        disk.room = 10**6 if ends_well else disk.room
        file.close()
    lines = [f"{line}\n".encode("utf-8", "backslashreplace") for line, _ in writes]
    kept = len(lines) - file.lost
    assert path.read_bytes() == b"".join(lines[:kept])
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
    monkeypatch.setattr(line_file, "MOST_WAITING", 10)
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
