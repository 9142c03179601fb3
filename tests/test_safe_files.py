"""What stands in place of a file is never waited for, followed, filled or emptied; and no file holds a secret."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli import safe_files
from gpipe_cli.config.schema import LogConfig
from gpipe_cli.errors import ResourceError, RunError
from gpipe_cli.safe_files import (
    DEEPEST,
    UnsafeFile,
    open_directory,
    open_regular,
    parse_json,
    read_regular,
    redacted,
    remember,
    writing,
)

WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_files, "_references", {})


def test_the_longest_value_is_replaced_first_and_numbers_stay() -> None:
    for name, value in {"A": "secret", "B": "secret-key", "C": "12345", "D": "cpu", "E": None}.items():
        remember(name, value)
    assert redacted("secret-key secret 12345 cpu") == "${oc.env:B} ${oc.env:A} 12345 cpu"


def test_no_file_of_a_run_holds_what_a_reference_stands_for(
    gpipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """overrides.yaml held the value, and so did the config.yaml of a run resumed with a new reference."""
    text = tmp_path / "hunter2.txt"
    text.write_text("to be or not to be, that is the question\n" * 40, encoding="utf-8")
    monkeypatch.setenv("GPIPE_TEXT", str(text))
    small = ("model=gpt", "model.width=8", "model.depth=1", "model.heads=1", "batch_size=4", "log.every=1")
    words = ("data=text", "data.path=${oc.env:GPIPE_TEXT}", "run_dir=run", "engine=single", *small)
    assert gpipe("train", *words, "steps=1").code == 0
    assert (
        gpipe("train", "resume=run", "steps=2", "logger._target_=gpipe_cli.loggers.protocol.NoLogger").code
        == 0
    )
    text.write_text("too short", encoding="utf-8")
    assert gpipe("train", "resume=run", "steps=3").code == 3
    holding = [
        path for path in (tmp_path / "run").rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()
    ]
    assert not holding
    assert "${oc.env:GPIPE_TEXT}" in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")


def test_a_message_in_the_log_of_a_run_names_the_reference(tmp_path: Path) -> None:
    from gpipe_cli.runs.recorder import run_log
    from gpipe_cli.training.metrics import LineFile

    remember("ROOT", "/data/hunter2")
    file = LineFile(tmp_path / "train.log")
    with pytest.raises(OSError, match="hunter2"), run_log(file, LogConfig(), step=0):
        raise OSError("/data/hunter2/7.png: cannot be read")
    file.close()
    log = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert "hunter2" not in log and "${oc.env:ROOT}/7.png: cannot be read" in log


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


STRANGERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "named pipe": (os.mkfifo, "is a named pipe"),
    "directory": (Path.mkdir, "is a directory"),
    "socket": (a_socket, "is a socket"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a (symbolic link|device)"),
}


@pytest.mark.parametrize("base", [True, False], ids=["in a run", "named by the user"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, WRITE, os.O_RDWR], ids=["read", "write", "both"])
@pytest.mark.parametrize("kind", STRANGERS)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str, flags: int, base: bool) -> None:
    """A named pipe was waited for, and /dev/zero read until the memory was full."""
    make, says = STRANGERS[kind]
    make(tmp_path / "file")
    with pytest.raises(UnsafeFile, match=f"{says}, not a regular file"):
        open_regular(tmp_path / "file", flags, base=tmp_path if base else None)


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_no_file_elsewhere_is_written_to_or_emptied(tmp_path: Path, link: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    getattr(run / "file", link)(victim)
    with pytest.raises(UnsafeFile, match="link"):
        open_regular(run / "file", WRITE, base=run)
    assert victim.read_text() == "precious"


def test_a_link_to_nowhere_makes_no_file_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").symlink_to(tmp_path / "made")
    with pytest.raises(UnsafeFile, match="is a symbolic link"):
        open_regular(tmp_path / "run" / "file", WRITE, base=tmp_path / "run")
    assert not (tmp_path / "made").exists()


def test_a_file_with_two_names_can_be_read(tmp_path: Path) -> None:
    """As a backup of hard links makes them."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "copy").hardlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "copy", 100, base=tmp_path) == b"content"


def test_the_directory_the_user_named_may_be_a_link_and_none_below_it(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "real").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(scratch, target_is_directory=True)
    (scratch / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    runs = tmp_path / "runs"
    os.close(open_regular(runs / "real" / "file", WRITE, base=runs))
    assert (scratch / "real" / "file").exists()
    with pytest.raises(UnsafeFile, match="'elsewhere' is a symbolic link, not a directory"):
        open_regular(runs / "elsewhere" / "file", WRITE, base=runs)
    with (
        pytest.raises(UnsafeFile, match="'elsewhere' is a symbolic link"),
        open_directory(runs / "elsewhere", runs),
    ):
        pass
    assert not (tmp_path / "file").exists()


def test_what_is_opened_is_closed_again(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("missing", "directory"):
        (tmp_path / "directory").mkdir(exist_ok=True)
        with pytest.raises(OSError, match=r"missing|directory"):
            open_regular(tmp_path / name, base=tmp_path)
    with pytest.raises(FileNotFoundError), open_directory(tmp_path / "directory" / "a" / "b", tmp_path):
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_no_more_is_read_than_fits_the_role_of_a_file(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UnsafeFile, match=r"has 1,099,511,627,776 bytes; gpipe reads at most 1,000"):
        read_regular(tmp_path / "file", 1000)


def test_a_prepared_path_is_the_runs_fault_and_a_full_disk_the_machines(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="file: is a directory"), writing(tmp_path / "file"):
        raise UnsafeFile("is a directory")
    with (
        pytest.raises(ResourceError, match=r"file: cannot be written: .*No space"),
        writing(tmp_path / "file"),
    ):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "text",
    [
        "1e999",
        "-1e999",
        f"{10**400}",
        "[" * 10**5,
        "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1),
        '{"a":' * 200 + "1" + "}" * 200,
        b"\xff",
        '{"a": 1}'.encode("utf-16"),
        "",
        "{",
    ],
)
def test_json_that_gpipe_never_wrote_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_json_that_gpipe_writes_is_read() -> None:
    assert parse_json(b'{"a": [1, 2.5, null, true, "x"], "seed": 9223372036854775807}') == {
        "a": [1, 2.5, None, True, "x"],
        "seed": 2**63 - 1,
    }
    assert parse_json("[Infinity]") == [float("inf")]
