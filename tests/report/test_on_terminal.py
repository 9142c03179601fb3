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
from typing import final

import pytest

from tests.support.screen import Screen

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


@final
class Terminal:
    """The end of a pseudo-terminal at which its user sits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.resize(WIDTH)

    def resize(self, width: int) -> None:
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    @property
    def echoes_control_keys(self) -> bool:
        return bool(termios.tcgetattr(self._descriptor)[3] & termios.ECHOCTL)

    def press(self, key: bytes) -> None:
        os.write(self._descriptor, key)

    def read_until(self, done: Callable[[str], bool]) -> str:
        """What arrived since the last call, up to the moment that `done` says so, or to the end."""
        output = ""
        with suppress(OSError):  # Linux says so when the last process has closed the terminal
            while not done(output) and (part := os.read(self._descriptor, 65536)):
                # The echo of Ctrl-C as it is, not as ^C: terminals ignore it, wherever it comes.
                output += self._decoder.decode(part.replace(b"\x03", b""))
        return output


@contextmanager
def on_terminal(*words: str) -> Iterator[Terminal]:
    """Run gpipe on a terminal of its own, and end it by force if it is still there afterwards."""
    process, descriptor = pty.fork()
    if process == 0:
        # Not what C code has added to the environment: the readline library sets COLUMNS.
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "gpipe_cli", *words], environment)
    try:
        yield Terminal(descriptor)
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(descriptor)


def test_control_c_works_while_torch_is_imported_which_the_terminal_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first output came after minutes, and Ctrl-C was ignored until torch was imported."""
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    screen = Screen(WIDTH)
    with on_terminal(*WORDS) as terminal:
        output = terminal.read_until(lambda output: "importing torch" in output)
        assert "run directory" not in output
        screen.feed(output)
        terminal.press(b"\x03")
        screen.feed(terminal.read_until(lambda output: False))
    assert [line for line in screen.lines if line] == ["gpipe: stopped by Ctrl-C"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_control_c_leaves_one_line_and_the_command_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    screen = Screen(WIDTH)
    with on_terminal(*WORDS, "epochs=100000", "log.layers=true", "log.console=true") as terminal:
        screen.feed(terminal.read_until(lambda output: "epoch 3/" in output))
        terminal.press(b"\x03")
        screen.feed(terminal.read_until(lambda output: "resume=here" in output))
        echoes_control_keys = terminal.echoes_control_keys
        screen.feed(terminal.read_until(lambda output: False))
    lines = [line for line in screen.lines if line and not re.match(r"step \d+ \| (train|eval) \|", line)]
    text = " ".join(" ".join(lines).split())
    # Only whole lines remain: those of evaluations, the last step, and the message. No part of a frame, and no ^C.
    assert "━" not in text and "^C" not in text and "samples/s  lr" not in text
    assert text.count("remaining") == 1
    assert echoes_control_keys
    assert text.endswith("resume with: gpipe train resume=here")
    assert "if this terminal closes: gpipe train resume=here" in text
    log = Path("here", "train.log").read_text(encoding="utf-8")
    assert "INFO stopped by Ctrl-C; saved in" in log and "Traceback" not in log


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
            terminal.resize(width)
            # The first frames were on their way before.
            output = terminal.read_until(lambda output, width=width: len(last_frame(output)[0]) == width)
            lines = last_frame(output)
            assert len(lines) == FRAME_LINES and max(map(len, lines)) == width
            assert ("workers idle" in lines[3], "parameters" in lines[5]) == (width > 40, width > 80)
