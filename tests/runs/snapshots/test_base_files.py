from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.errors import RunError
from gpipe_cli.runs.snapshots.record import BaseFiles, digest_files


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text(f"the content of {name}")
    return tmp_path


def test_the_same_files_in_another_directory_are_accepted(directory: Path, tmp_path: Path) -> None:
    base = digest_files(directory, ["config.json", "model.safetensors"])
    assert BaseFiles.from_json(base.to_json()) == base
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in base.files:
        (moved / name).write_bytes((directory / name).read_bytes())
    base.check(directory)
    base.check(moved)


def test_a_file_that_changed_is_refused(directory: Path) -> None:
    base, file = digest_files(directory, ["model.safetensors"]), directory / "model.safetensors"
    before = file.read_text()
    file.write_text(before.upper())
    base.check(directory, contents=False)
    with pytest.raises(
        RunError, match=r"another base model: .*model.safetensors has changed \(content\); give model"
    ):
        base.check(directory)
    file.write_text(before + "!")
    with pytest.raises(RunError, match=r"has changed \(33 instead of 32 bytes\)"):
        base.check(directory, contents=False)


def test_a_missing_file_is_named_with_the_cure(directory: Path) -> None:
    base = digest_files(directory, ["model.safetensors"])
    with pytest.raises(
        RunError, match=r"cannot be read \(No such file or directory\); give model.path=<directory>"
    ):
        base.check(directory / "elsewhere")
    with pytest.raises(RunError, match="a file of the base model cannot be read"):
        digest_files(directory, ["nothing"])


@pytest.mark.parametrize(
    "content",
    [
        None,
        {"directory": "x", "files": {}},
        {"directory": 1, "files": {"a": {"size": 1, "sha256": ""}}},
        {"directory": "x", "files": {f"..{os.sep}a": {"size": 1, "sha256": ""}}},
        {"directory": "x", "files": {"..": {"size": 1, "sha256": ""}}},
        {"directory": "x", "files": {"a": {"size": "1", "sha256": ""}}},
    ],
)
def test_a_damaged_reference_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="does not describe"):
        BaseFiles.from_json(content)
