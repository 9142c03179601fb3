from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import ConfigError, ResourceError
from gpipe_cli.training import run_directory
from gpipe_cli.training.run_directory import check_run_dir, make_run_directory, write_json

# torch is not needed to make a directory, so twenty processes start in moments.
LAUNCH = """
import sys
from pathlib import Path
from gpipe_cli.training import run_directory
run_directory.time.strftime = lambda form: "20260101-120000"
sys.stdin.readline()
print(run_directory.make_run_directory(None, "train", "model", None))
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
    path = make_run_directory(None, "train", name, None)
    parts = path.parts
    assert parts[:2] == ("runs", "train") and len(parts) == 4
    assert path.resolve().is_relative_to(tmp_path / "runs" / "train")
    assert path.is_dir()


@given(st.text())
def test_no_name_leaves_its_folder(name: str) -> None:
    safe = run_directory._safe(name)
    assert Path(safe).parts == (safe,) and safe not in (".", "..")
    assert len(safe.encode()) <= 80 and safe.isprintable()


def test_a_directory_that_was_asked_for_is_made_with_its_parents() -> None:
    assert make_run_directory("a/b/c", "train", "model", None) == Path("a/b/c")
    assert Path("a/b/c").is_dir()


def test_a_job_of_a_sweep_gets_a_numbered_folder() -> None:
    assert make_run_directory("sweep", "train", "model", 3) == Path("sweep/3")
    check_run_dir("sweep", 4)
    with pytest.raises(ConfigError, match="run_dir=sweep: exists and is not empty"):
        check_run_dir("sweep", None)


def test_an_empty_directory_is_taken_and_a_full_one_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert make_run_directory("mine", "train", "model", None) == Path("mine")
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ConfigError, match="run_dir=mine: exists and is not empty; choose another one"):
        make_run_directory("mine", "train", "model", None)


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
        check_run_dir(run_dir, None)


@pytest.mark.parametrize("run_dir", ["closed/run", None])
def test_a_place_that_cannot_be_written_to_is_a_matter_of_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str | None
) -> None:
    """root may write anywhere, so the answer of the system is given for it."""
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ResourceError, match="cannot be written to"):
        check_run_dir(run_dir, None)


@pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="needs a file system that root cannot write to"
)
def test_not_even_root_can_write_to_a_read_only_file_system() -> None:
    with pytest.raises((ResourceError, ConfigError)):
        make_run_directory("/proc/gpipe/run", "train", "model", None)


def test_json_is_written_for_people_too(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": 1\n}\n'
