"""Streams that are closed, full or nobody's: processes of their own, since a stream is a descriptor of a process."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import gpipe_cli

WRITE = """
import sys
from gpipe_cli.report.output import print_status, secure_streams
secure_streams()
from pathlib import Path
with Path(sys.argv[1]).open("w") as file:
    for _ in range(3):
        sys.stdout.write("result " + "x" * 9000 + chr(10))
        sys.stdout.flush()
        print_status("progress")
        file.write("trained")
print("printed as Python ends", end="")
"""


def closed(descriptor: int) -> None:
    os.close(descriptor)


def full(descriptor: int) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)


def without_reader(descriptor: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, descriptor)


def closed_terminal(descriptor: int) -> None:
    leader, follower = pty.openpty()
    os.dup2(follower, descriptor)
    os.close(follower)
    os.close(leader)


def intact(descriptor: int) -> None:
    pass


BROKEN = (closed, full, without_reader, closed_terminal)
KINDS = (intact, *BROKEN)


def ended(
    path: Path, out: Callable[[int], None], err: Callable[[int], None]
) -> subprocess.CompletedProcess[str]:
    def break_streams() -> None:
        out(1)
        err(2)

    return subprocess.run(
        [sys.executable, "-c", WRITE, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(gpipe_cli.__file__).parents[1])},
        preexec_fn=break_streams,
        check=False,
    )


@pytest.mark.parametrize(
    ("out", "err"),
    [
        *((kind, intact) for kind in KINDS),
        *((intact, kind) for kind in BROKEN),
        *((kind, kind) for kind in BROKEN),
    ],
    ids=lambda kind: kind.__name__,
)
def test_no_stream_changes_what_a_process_does_or_its_exit_code(
    tmp_path: Path, out: Callable[[int], None], err: Callable[[int], None]
) -> None:
    """`2>&-` used to end a run with 1 before it began, `>&-` and `>/dev/full` after it had finished."""
    done = ended(tmp_path / "file", out, err)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "trained" * 3, "no stream took the number of a file"
    if err is intact:
        lost = "warning: cannot write to stdout: No space left on device; the result is lost"
        assert done.stderr.splitlines() == [*([lost] if out is full else []), *["progress"] * 3]
    if out is intact:
        assert done.stdout.count("result") == 3 and done.stdout.endswith("printed as Python ends")


def test_a_reader_of_a_non_blocking_pipe_gets_all_of_it(tmp_path: Path) -> None:
    """Another process that shares the pipe may have made it so; Python's own stream raises then."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    code = (
        "import sys; from gpipe_cli.report.output import secure_streams; secure_streams();"
        "sys.stdout.write('x' * 1_000_000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writer)
    os.close(writer)
    received = 0
    with suppress(OSError):
        while part := os.read(reader, 65536):
            received += len(part)
    os.close(reader)
    assert process.wait() == 0 and received == 1_000_000
