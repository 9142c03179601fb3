from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.runs import directory as run_directory
from gpipe_cli.runs.directory import (
    LOCK_NAME,
    check_run_dir,
    lock_run_directory,
    make_run_directory,
    write_json,
)

# torch is not needed to make a directory, so twenty processes start in moments.
LAUNCH = """
import sys
from pathlib import Path
from gpipe_cli.runs import directory as run_directory
run_directory.time.strftime = lambda form: "20260101-120000"
sys.stdin.readline()
print(run_directory.make_run_directory(None, "train", "model"))
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_twenty_launches_in_one_second_get_twenty_directories(tmp_path: Path) -> None:
    """All twenty processes believe it is the same second, and are let go at once."""
    root = str(Path(run_directory.__file__).parents[2])
    launches = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
        )
        for _ in range(20)
    ]
    for launch in launches:
        assert launch.stdin is not None
        launch.stdin.write("go\n")
        launch.stdin.flush()
    made = [launch.communicate()[0].strip() for launch in launches]
    assert len(set(made)) == 20 and all(launch.returncode == 0 for launch in launches)
    assert {Path(path).name for path in made} == {
        path.name for path in (tmp_path / "runs" / "train" / "model").iterdir()
    }
    assert "runs/train/model/20260101-120000" in made and "runs/train/model/20260101-120000-20" in made


HOSTILE = [
    "../../x",
    "..",
    ".",
    "",
    "/etc/passwd",
    "x" * 300,
    "\N{MATHEMATICAL FRAKTUR SMALL X}" * 300,
    "a\nb",
    "a\x00b",
    "\x1b[31m",
    "-rf",
    "a/../b",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_one_safe_component(tmp_path: Path, name: str) -> None:
    path = make_run_directory(None, "train", name)
    parts = path.parts
    assert parts[:2] == ("runs", "train") and len(parts) == 4
    assert path.resolve().is_relative_to(tmp_path / "runs" / "train")
    assert path.is_dir()


@given(st.text())
def test_no_name_leaves_its_folder(name: str) -> None:
    safe = run_directory._path_component(name)
    assert Path(safe).parts == (safe,) and safe not in (".", "..")
    assert len(safe.encode()) <= 80 and safe.isprintable()


def test_a_directory_that_was_asked_for_is_made_with_its_parents() -> None:
    assert make_run_directory("a/b/c", "train", "model") == Path("a/b/c")
    assert Path("a/b/c").is_dir()


def test_an_empty_directory_is_taken_and_a_full_one_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.lock").touch()  # of a run that was killed before it wrote anything
    assert make_run_directory("mine", "train", "model") == Path("mine")
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(
        ConfigError, match="run_dir=mine: the directory exists and is not empty; choose another one"
    ):
        make_run_directory("mine", "train", "model")


@pytest.mark.parametrize(
    ("run_dir", "says"),
    [
        ("file", "file is a file; choose another directory"),
        ("file/below", "file is a file; choose another directory"),
        ("x" * 300, "cannot be used"),
        ("nul\x00", "give the name of a directory"),
        ("", "run_dir=: give the name of a directory"),
    ],
)
def test_what_can_be_no_directory_is_refused_before_anything_else(
    tmp_path: Path, run_dir: str, says: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=says):
        check_run_dir(run_dir)


@pytest.mark.parametrize("run_dir", ["closed/run", None])
def test_a_place_that_cannot_be_written_to_is_a_matter_of_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str | None
) -> None:
    """root may write anywhere, so the answer of the system is given for it."""
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ResourceError, match="is not writable"):
        check_run_dir(run_dir)


@pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="needs a file system that root cannot write to"
)
def test_not_even_root_can_write_to_a_read_only_file_system() -> None:
    with pytest.raises((ResourceError, ConfigError)):
        make_run_directory("/proc/gpipe/run", "train", "model")


def test_json_is_written_for_people_too(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": 1\n}\n'


def refused_in_another_process(run: Path, says: str, content: str | None = None) -> bool:
    """A process never refuses itself, and loses its lock by a look at the file, so another one has to try."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if content is not None:
                (run / LOCK_NAME).write_text(content)
            with lock_run_directory(run):
                pass
        except ConfigError as error:
            code = 0 if says in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_owner_is_named_and_the_file_goes_with_it(tmp_path: Path) -> None:
    with lock_run_directory(tmp_path):
        owner = f"process {os.getpid()} on {os.uname().nodename}, since 20"
        assert refused_in_another_process(tmp_path, f"in use by {owner}")
    assert list(tmp_path.iterdir()) == []
    assert not refused_in_another_process(tmp_path, "")


def test_what_a_dead_owner_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text(
        '{"pid": 1, "host": "here", "started": "2026"} and much more that is no JSON'
    )
    with lock_run_directory(tmp_path):
        assert refused_in_another_process(tmp_path, f"in use by process {os.getpid()} on")
        assert refused_in_another_process(tmp_path, "in use by another process", content="nonsense")


@pytest.mark.parametrize("kind", ["symlink", "hard link"])
def test_a_lock_is_no_way_to_another_file(tmp_path: Path, kind: str) -> None:
    """run.lock as a second name of a file replaced what was in it."""
    precious = tmp_path / "precious"
    precious.write_text("content")
    lock = tmp_path / LOCK_NAME
    (lock.symlink_to if kind == "symlink" else lock.hardlink_to)(precious)
    with pytest.raises(RunError, match=r"run.lock: is a .*link"), lock_run_directory(tmp_path):
        pass
    assert precious.read_text() == "content"


def test_a_named_pipe_is_no_lock(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_NAME)
    with (
        pytest.raises(RunError, match=r"run.lock: is a named pipe, not a regular file"),
        lock_run_directory(tmp_path),
    ):
        pass


def full(descriptor: int, content: bytes, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_a_matter_of_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming on a full disk ended with code 1."""
    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(ResourceError, match=r"run.lock: cannot be written: .*No space left"),
        lock_run_directory(tmp_path),
    ):
        pass


def test_a_directory_that_lost_its_permissions_does_not_hide_why_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of removing the lock took the place of the one that ended the run."""

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def run() -> None:
        with lock_run_directory(tmp_path):
            monkeypatch.setattr(Path, "unlink", refused)
            raise ResourceError("the snapshot cannot be written")

    with pytest.raises(ResourceError, match="the snapshot cannot be written"):
        run()
