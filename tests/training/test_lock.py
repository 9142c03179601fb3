from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.training.lock import NAME, only_writer


def refused_in_another_process(run: Path, says: str, content: str | None = None) -> bool:
    """A process never refuses itself, and loses its lock by a look at the file, so another one has to try."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if content is not None:
                (run / NAME).write_text(content)
            with only_writer(run):
                pass
        except ConfigError as error:
            code = 0 if says in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_owner_is_named_and_the_file_goes_with_it(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        owner = f"process {os.getpid()} on {os.uname().nodename}, since 20"
        assert refused_in_another_process(tmp_path, f"in use by {owner}")
    assert list(tmp_path.iterdir()) == []
    assert not refused_in_another_process(tmp_path, "")


def test_what_a_dead_owner_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(
        '{"pid": 1, "host": "here", "started": "2026"} and much more that is no JSON'
    )
    with only_writer(tmp_path):
        assert refused_in_another_process(tmp_path, f"in use by process {os.getpid()} on")
        assert refused_in_another_process(tmp_path, "in use by another process", content="nonsense")


@pytest.mark.parametrize("kind", ["symlink", "hard link"])
def test_a_lock_is_no_way_to_another_file(tmp_path: Path, kind: str) -> None:
    """run.lock as a second name of a file replaced what was in it."""
    precious = tmp_path / "precious"
    precious.write_text("content")
    lock = tmp_path / NAME
    (lock.symlink_to if kind == "symlink" else lock.hardlink_to)(precious)
    with pytest.raises(RunError, match=r"run.lock: is a .*link"), only_writer(tmp_path):
        pass
    assert precious.read_text() == "content"


def test_a_named_pipe_is_no_lock(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with (
        pytest.raises(RunError, match=r"run.lock: is a named pipe, not a regular file"),
        only_writer(tmp_path),
    ):
        pass


def full(descriptor: int, content: bytes, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_a_matter_of_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming on a full disk ended with code 1."""
    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(ResourceError, match=r"run.lock: cannot be written: .*No space left"),
        only_writer(tmp_path),
    ):
        pass


def test_a_directory_that_lost_its_permissions_does_not_hide_why_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of removing the lock took the place of the one that ended the run."""

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def run() -> None:
        with only_writer(tmp_path):
            monkeypatch.setattr(Path, "unlink", refused)
            raise ResourceError("the snapshot cannot be written")

    with pytest.raises(ResourceError, match="the snapshot cannot be written"):
        run()
