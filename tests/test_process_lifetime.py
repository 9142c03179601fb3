from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from gpipe_cli.errors import ResourceError
from gpipe_cli.process_lifetime import LOCK, remove_abandoned_folders, temporary_folder
from tests.support.command_line import Gpipe


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def abandoned(kind: str) -> Path:
    """The folder of a process that was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with temporary_folder(kind) as folder:
            (folder / "inner").mkdir()
            os.write(writer, bytes(folder))
            signal.pause()
    folder = Path(os.read(reader, 1000).decode())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert folder.is_dir()
    return folder


def test_the_next_start_removes_what_a_killed_launcher_and_a_killed_sweep_have_left(
    gpipe: Gpipe,
) -> None:
    left = [abandoned(kind) for kind in ("ranks", "sweep")]
    with temporary_folder("ranks") as own:
        assert gpipe("train", "chunks=0").code == 2
        assert own.is_dir(), "its owner lives"
    assert not any(folder.exists() for folder in (*left, own))


def test_nothing_is_removed_that_is_not_provably_abandoned(temporary: Path) -> None:
    unmarked, linked, elsewhere = (temporary / name for name in ("gpipe-ranks-x", "gpipe-ranks-y", "victim"))
    unmarked.mkdir()
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    linked.symlink_to(elsewhere)
    with_link = abandoned("sweep")
    (with_link / "out").symlink_to(elsewhere)
    with_fifo = temporary / "gpipe-sweep-z"
    with_fifo.mkdir()
    os.mkfifo(with_fifo / LOCK)
    remove_abandoned_folders()
    assert unmarked.exists() and linked.is_symlink() and (elsewhere / LOCK).exists() and with_fifo.exists()
    assert not with_link.exists()


def test_a_folder_that_cannot_be_made_is_a_resource_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    remove_abandoned_folders()
    with pytest.raises(ResourceError, match=r"No such file.*set TMPDIR"), temporary_folder("ranks"):
        pass
