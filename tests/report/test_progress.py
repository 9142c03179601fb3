"""What a person sees: real processes, because what matters is what stderr is connected to."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import gpipe_cli
from gpipe_cli.report import progress
from gpipe_cli.report.progress import BLOCKS, Eta, ProgressLines, ProgressPanel, sparkline

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
ROWS = [{"device": "cpu", "parameter_bytes": 2**20, "gradient_bytes": 2**20}, {"device": "cuda:0"}]


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
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    eta = Eta(steps=3600)
    assert [eta.after(step) for step in (1, 2, 3, 3570)] == ["-", "1:59:56", "1:59:54", "0:00"]


def drawn(panel: ProgressPanel, width: int, height: int = 24) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, height=height, legacy_windows=False).print(panel)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.fixture
def panel() -> ProgressPanel:
    panel = ProgressPanel(steps=8, epochs=2, partitions=ROWS)
    for step in range(1, 7):
        panel.step(step, (step - 1) // 4, 3.0 / step, 1e-3, 120.0, "read 3 MiB")
        panel.utilization([0.25, 0.75], 0.5, [None, 3 * 2**20])
    return panel


def test_a_wide_panel_shows_everything(panel: ProgressPanel) -> None:
    progress, loss, numbers, *partitions = drawn(panel, 100)
    assert re.fullmatch(r"epoch 2/2 [━╸╺ ]+ 6/8  eta 0:00", progress)
    assert loss == "loss 0.5000 █▄▂▂▁▁"
    assert numbers == "lr 1.00e-03  120 samples/s  bubble 50 %  read 3 MiB"
    assert re.fullmatch(r"0 cpu +[━╸╺ ]+ 25 % busy +2.00 MiB \+ activations", partitions[0])
    assert re.fullmatch(r"1 cuda:0 +[━╸╺ ]+ 75 % busy +3.00 MiB at most", partitions[1])


@pytest.mark.parametrize("width", [20, 39, 69, 70, 200])
def test_no_line_is_wider_than_the_terminal(panel: ProgressPanel, width: int) -> None:
    lines = drawn(panel, width)
    assert len(lines) == 5 and max(map(len, lines)) <= width
    assert lines[0].startswith("epoch 2/2") and "6/8" in lines[0] and "25 %" in lines[3]


def test_partitions_beyond_the_height_are_counted() -> None:
    panel = ProgressPanel(8, 1, [])
    panel.utilization([0.5] * 40, 0.5, [None] * 40)
    lines = drawn(panel, 80, height=10)
    assert len(lines) < 10 and lines[-1] == "... and 37 more"


def test_single_steps_do_not_flicker() -> None:
    panel = ProgressPanel(8, 1, [])
    panel.utilization([1.0], 0.0, [None])
    panel.utilization([0.0], 1.0, [None])
    assert "80 % busy" in drawn(panel, 80)[-1] and "bubble 20 %" in drawn(panel, 80)[2]


def reflowed_rows(lines: list[str], width: int) -> int:
    """How many rows a terminal of that width shows of lines that were wider."""
    return sum(max(1, -(-len(line) // width)) for line in lines)


@pytest.mark.parametrize("narrower", [20, 33, 60])
def test_a_frame_that_a_narrower_terminal_has_broken_is_cleared_as_a_whole(narrower: int) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, height=24, legacy_windows=False)
    panel = ProgressPanel(8, 2, ROWS, console)
    with panel:
        panel.utilization([0.25, 0.75], 0.5, [None, 3 * 2**20])
        panel.print_status("as wide as before")
        before = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", file.getvalue()).splitlines()[-5:]
        file.truncate(0)
        console.width = narrower
        panel.print_status("narrower")
        cleared = file.getvalue().split("narrower")[0].count("\x1b[2K")
    # The row that the cursor is in counts as well: it is cleared before it is left.
    assert cleared == reflowed_rows(before, narrower)


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(0, 80))
def test_a_sparkline_has_its_width_and_goes_from_low_to_high(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    assert set(line) <= set(BLOCKS)


def test_a_sparkline_follows_its_values() -> None:
    assert sparkline([0, 7, 3.5], 10) == "▁█▅"
    assert sparkline([1, 1, 1], 2) == "▁▁"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""
