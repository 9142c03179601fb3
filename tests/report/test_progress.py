"""What a person sees: real processes, because what matters is what stderr is connected to."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

import gpipe_cli
from gpipe_cli.report.progress import (
    Progress,
    ProgressLines,
    RunSize,
    ShownEvaluation,
    ShownStep,
    format_clock,
    format_speed,
)

SHOW_PROGRESS = """
from gpipe_cli.report.progress import progress_display
from gpipe_cli.report.progress import RunSize, ShownEvaluation, ShownStep
with progress_display(RunSize(steps=4, epochs=2)) as display:
    display.print_status("run directory: a\\x1b[2Jb\\nc")
    for step in range(1, 5):
        display.step(ShownStep(step, (step - 1) // 2, 1 / step, 0.001, 99.0, float(step)))
    display.evaluating(0)
    display.evaluated(ShownEvaluation(4, 1, 0.25, {"top1": 0.5}, 6.0))
"""
LINES = [
    "run directory: a[2Jb c",
    "step 1/4 | epoch 1/2 | train loss 1.0000 | lr 0.001 | 99 samples/s | elapsed 0:01 | remaining -",
    "step 4/4 | epoch 2/2 | train loss 0.5208 | lr 0.001 | 99 samples/s | elapsed 0:04 | remaining 0:00",
    "step 4/4 | epoch 2/2 | eval loss 0.2500 | top1 50.00 % | elapsed 0:06",
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
    for part in ("epoch 2/2", "4/4", "train loss 0.5208", "lr 0.001", "99 samples/s", "0:00 left", "━"):
        assert part in shown
    assert "evaluating" in shown and "eval loss 0.2500" in shown
    assert "run directory: a[2Jb c" in shown and "\x1b[2J" not in shown


def test_a_dumb_terminal_gets_lines_without_escape_codes() -> None:
    assert on_a_terminal(TERM="dumb").splitlines() == LINES


def test_no_color_is_obeyed() -> None:
    shown = on_a_terminal(TERM="xterm-256color", NO_COLOR="1")
    assert "4/4" in shown
    assert "\x1b[3" not in shown and "\x1b[38" not in shown


def step(number: int, seconds: float, loss: float = 1.0) -> ShownStep:
    return ShownStep(number, 0, loss, 0.1, 1.0, seconds)


def steps_with_a_line(
    lines: ProgressLines, seconds: Sequence[float], capsys: pytest.CaptureFixture[str]
) -> list[int]:
    for number, moment in enumerate(seconds, 1):
        lines.step(step(number, moment))
    printed = capsys.readouterr().err.splitlines()
    return [int(line.split("/")[0].removeprefix("step ")) for line in printed]


def test_the_first_step_has_a_line_at_once_and_later_ones_by_time(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines(RunSize(steps=10_000, epochs=1))
    # Steps of four seconds: every third at first. After 200 seconds a line comes after a tenth of the time so far.
    printed = steps_with_a_line(lines, [4.0 * number for number in range(1, 251)], capsys)
    assert printed[:6] == [1, 4, 7, 10, 13, 16]
    gaps = [later - earlier for earlier, later in pairwise(printed)]
    assert gaps == sorted(gaps) and 20 <= gaps[-1] <= 25


def test_a_fast_run_does_not_flood(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines(RunSize(steps=5000, epochs=1))
    assert steps_with_a_line(lines, [0.001 * number for number in range(5000)], capsys) == [1, 5000]
    for number in range(1, 1001):
        lines.evaluated(ShownEvaluation(number, 0, 1.0, {}, 6.0))
    assert len(capsys.readouterr().err.splitlines()) == 20
    lines.evaluated(ShownEvaluation(5000, 0, 1.0, {}, 6.0))
    assert capsys.readouterr().err.startswith("step 5000/5000 | epoch 1/1 | eval loss 1.0000")


def test_the_intervals_of_a_resumed_run_begin_anew(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines(RunSize(steps=100, epochs=1))
    assert steps_with_a_line(lines, [90_000.0, 90_005.0, 90_011.0], capsys) == [1, 3]


def test_the_time_left_follows_the_pace_and_leaves_out_the_first_step() -> None:
    progress = Progress(RunSize(steps=3600, epochs=1))
    remaining = []
    for number, seconds in ((1, 100.0), (2, 102.0), (3, 104.0), (3600, 106.0)):
        progress.after(step(number, seconds))
        remaining.append(format_clock(progress.remaining))
    assert remaining == ["-", "1:59:56", "1:59:54", "0:00"]


@pytest.mark.parametrize(
    ("speed", "text"), [(0.123, "0.12"), (9.5, "9.50"), (99.4, "99"), (12345.6, "12346")]
)
def test_a_slow_run_shows_fractions_of_a_sample(speed: float, text: str) -> None:
    assert format_speed(speed) == f"{text} samples/s"


def test_the_train_loss_is_the_mean_of_the_last_steps_whose_loss_is_finite() -> None:
    progress = Progress(RunSize(steps=100, epochs=1))
    for number, loss in enumerate([1000.0, *[2.0, 4.0] * 10, float("nan")], 1):
        progress.after(step(number, 0.0, loss))
    assert progress.loss == 3.0 and progress.averaged == 20
