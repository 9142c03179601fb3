from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpipe_cli.errors import ConfigError, ResourceError
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


def test_a_lock_is_no_way_to_another_file(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / NAME).symlink_to(precious)
    with pytest.raises(ResourceError, match="cannot be locked"), only_writer(tmp_path):
        pass
    assert precious.read_text() == "content"
