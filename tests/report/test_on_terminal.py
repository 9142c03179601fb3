"""A training run on a pseudo-terminal, which echoes what its user types."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.report.screen import Screen

WIDTH = 80
WORDS = (
    "train",
    "model=mlp",
    "data=synthetic",
    "data.shape=[3,8,8]",
    "data.length=64",
    "batch_size=20",
    "run_dir=here",
)
FRAME_LINES = 6


@contextmanager
def on_terminal(*words: str) -> Iterator[int]:
    """Run gpipe on a terminal of its own, and end it by force if it is still there afterwards."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm-256color", OMP_NUM_THREADS="1")
        os.environ.pop("COLUMNS", None)
        os.execv(sys.executable, [sys.executable, "-m", "gpipe_cli", *words])
    resize(terminal, WIDTH)
    try:
        yield terminal
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


def resize(terminal: int, width: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))


def read_until(terminal: int, done: Callable[[str], bool]) -> str:
    """What the terminal received, up to the moment that `done` says so, or to its end."""
    output, decoder = "", codecs.getincrementaldecoder("utf-8")()
    with suppress(OSError):  # Linux says so when the last process has closed the terminal
        while not done(output) and (part := os.read(terminal, 65536)):
            output += decoder.decode(part)
    return output


@pytest.mark.slow
def test_control_c_leaves_one_line_and_the_command_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    screen = Screen(WIDTH)
    with on_terminal(*WORDS, "epochs=100000", "log.layers=true", "log.console=true") as terminal:
        screen.feed(read_until(terminal, lambda output: "epoch 3/" in output))
        os.write(terminal, b"\x03")
        screen.feed(read_until(terminal, lambda output: False))
    lines = [line for line in screen.lines if line and not re.match(r"step \d+ \| (train|eval) \|", line)]
    text = "".join(lines)
    # Only whole lines remain: those of evaluations, the last step, and the message. No part of a frame, and no ^C.
    assert "━" not in text and "^C" not in text and "samples/s  lr" not in text
    assert text.count("remaining") == 1
    assert text.endswith("resume with: gpipe train resume=here")


def last_frame(output: str) -> list[str]:
    """The last frame that another one has replaced, and is whole for that reason."""
    written = [part for part in output[-20_000:].split("\x1b[2K") if "busy" in part]
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", written[-2]) if len(written) > 1 else ""
    return plain.rstrip("\n").split("\n")[-FRAME_LINES:]


@pytest.mark.slow
def test_the_panel_follows_a_terminal_that_changes_its_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    with on_terminal(*WORDS, "epochs=100000") as terminal:
        for width in (WIDTH, 160, 40):
            resize(terminal, width)
            # The first frames were on their way before.
            output = read_until(terminal, lambda output, width=width: len(last_frame(output)[0]) == width)
            lines = last_frame(output)
            assert len(lines) == FRAME_LINES and max(map(len, lines)) == width
            assert ("workers idle" in lines[3], "parameters" in lines[5]) == (width > 40, width > 80)
