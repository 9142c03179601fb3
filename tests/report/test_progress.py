"""What a person sees: real processes, because what matters is what stderr is connected to."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import gpipe_cli
from gpipe_cli.report import panel
from gpipe_cli.report.panel import Eta
from gpipe_cli.report.progress import ProgressLines

SHOW_PROGRESS = """
from gpipe_cli.report.progress import progress_display
with progress_display(steps=4, epochs=2, every=2) as display:
    display.print_status("run directory: a\\x1b[2Jb\\nc")
    for step in range(1, 5):
        display.step(step, (step - 1) // 2, 0.5, 0.001, 99.0)
"""
LINES = [
    "run directory: a[2Jb c",
    "epoch 1/2 | step 2/4 | loss 0.5000 | lr 1.00e-03 | 99 samples/s | eta 0:00",
    "epoch 2/2 | step 4/4 | loss 0.5000 | lr 1.00e-03 | 99 samples/s | eta 0:00",
]


def environment(**variables: str) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")
    }
    root = str(Path(gpipe_cli.__file__).parents[1])
    return {**inherited, "PYTHONPATH": root, "COLUMNS": "120", **variables}


def on_a_terminal(**variables: str) -> str:
    """What reaches a terminal that the process has as its stderr."""
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SHOW_PROGRESS],
        stderr=follower,
        stdout=subprocess.DEVNULL,
        env=environment(**variables),
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # Linux says so when the other end is closed
                part = b""
            if not part:
                break
            shown += part
    os.close(leader)
    assert process.returncode == 0
    return shown.decode()


def test_a_pipe_gets_plain_lines() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SHOW_PROGRESS],
        capture_output=True,
        text=True,
        env=environment(TERM="xterm"),
        check=True,
    )
    assert process.stderr.splitlines() == LINES
    assert process.stdout == ""


def test_a_terminal_gets_a_panel_with_all_that_matters() -> None:
    shown = on_a_terminal(TERM="xterm-256color")
    assert "\x1b[" in shown
    for part in ("epoch 2/2", "4/4", "loss 0.5000", "lr 1.00e-03", "99 samples/s", "eta 0:00", "━"):
        assert part in shown
    assert "run directory: a[2Jb c" in shown and "\x1b[2J" not in shown


def test_a_dumb_terminal_gets_lines_without_escape_codes() -> None:
    assert on_a_terminal(TERM="dumb").splitlines() == LINES


def test_no_color_is_obeyed() -> None:
    shown = on_a_terminal(TERM="xterm-256color", NO_COLOR="1")
    assert "4/4" in shown
    assert "\x1b[3" not in shown and "\x1b[38" not in shown


def test_the_last_step_has_a_line_whatever_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLines(steps=5, epochs=1, every=3) as display:
        for step in range(1, 6):
            display.step(step, 0, 1.0, 0.1, 1.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" | ")[1] for line in lines] == ["step 3/5", "step 5/5"]


def test_the_time_left_follows_the_pace_and_leaves_out_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([100.0, 102.0, 104.0, 106.0])
    monkeypatch.setattr(panel.time, "monotonic", lambda: next(clock))
    eta = Eta(steps=3600)
    assert [eta.after(step) for step in (1, 2, 3, 3570)] == ["-", "1:59:56", "1:59:54", "0:00"]
