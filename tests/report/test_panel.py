"""The live panel, drawn into a string and, where the cursor matters, shown on a terminal."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpipe_cli.report import panel as panel_module
from gpipe_cli.report.panel import BLOCKS, ProgressPanel, sparkline
from gpipe_cli.report.progress import RunSize, ShownEvaluation, ShownStep
from tests.support.screen import Screen

ROWS = [
    {
        "device": "cpu",
        "first": "stem",
        "last": "layer1.1",
        "parameters": 1500,
        "parameter_bytes": 2**20,
        "gradient_bytes": 2**20,
    },
    {"device": "cuda:0", "first": "head", "last": "head", "parameters": 12},
]
SIZE = RunSize(steps=8, epochs=2, eval_batches=5, partitions=ROWS)


@pytest.fixture(autouse=True)
def fixed_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither memory nor clock of this machine, and no frames but those that a test asks for."""
    monkeypatch.setattr(panel_module, "process_peak_bytes", lambda: 300 * 2**20)
    monkeypatch.setattr(panel_module.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(panel_module, "FRAMES_PER_SECOND", 1e-6)


def drawn(panel: ProgressPanel, width: int, height: int = 24) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, height=height, legacy_windows=False).print(panel)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def show_steps(panel: ProgressPanel, last: int = 6) -> None:
    for step in range(1, last + 1):
        panel.step(ShownStep(step, (step - 1) // 4, 3.0 / step, 1e-3, 120.0, 2.0 * step, 1.25, "moved 3 MiB"))
        panel.utilization([0.25, 0.75], 0.5, [None, 3 * 2**20])


@pytest.fixture
def panel() -> ProgressPanel:
    panel = ProgressPanel(SIZE)
    show_steps(panel)
    return panel


def test_a_panel_of_80_columns_shows_what_matters(panel: ProgressPanel) -> None:
    progress, train_loss, eval_loss, numbers, *partitions = drawn(panel, 80)
    assert re.fullmatch(r"epoch 2/2 [━╸╺ ]+ step 6/8  0:12 elapsed  0:04 left", progress)
    assert train_loss == "train loss 1.2250 mean of 6 steps █▄▂▂▁▁"
    assert eval_loss == "eval loss -"
    assert numbers == "120 samples/s  lr 0.001  moved 3 MiB  bubble 50 % (workers idle)  grad norm 1.25"
    assert re.fullmatch(r"0 cpu +[━╸╺ ]+ 25 % busy +2.00 MiB model state", partitions[0])
    assert re.fullmatch(r"1 cuda:0 +[━╸╺ ]+ 75 % busy +3.00 MiB peak", partitions[1])


def test_a_panel_of_a_run_without_evaluations_has_no_line_for_them() -> None:
    panel = ProgressPanel(replace(SIZE, eval_batches=0))
    show_steps(panel)
    assert [line.split()[0] for line in drawn(panel, 80)] == ["epoch", "train", "120", "0", "1"]


def test_a_panel_of_160_columns_shows_more(panel: ProgressPanel) -> None:
    _, _, _, numbers, *partitions = drawn(panel, 160)
    assert numbers.endswith("bubble 50 % (workers idle)  process peak 300.00 MiB  grad norm 1.25")
    assert partitions[0].startswith("0 cpu    stem to layer1.1, 1.50k parameters")
    assert partitions[1].startswith("1 cuda:0 head, 12 parameters")


def test_an_evaluation_is_announced_with_its_progress_and_then_its_result(panel: ProgressPanel) -> None:
    panel.evaluating(2)
    assert re.fullmatch(
        r"evaluating, epoch 2/2 [━╸╺ ]+ batch 2/5  0:12 elapsed  0:04 left", drawn(panel, 80)[0]
    )
    assert re.fullmatch(r"evaluating [━╸╺ ]+ 2/5  0:04 left", drawn(panel, 40)[0])
    panel.evaluated(ShownEvaluation(6, 1, 0.25, {"top1": 0.5}, 14.0))
    assert re.fullmatch(r"epoch 2/2 [━╸╺ ]+ step 6/8  0:14 elapsed  0:02 left", drawn(panel, 80)[0])
    assert drawn(panel, 80)[2] == "eval loss 0.2500  top1 50.00 %  epoch 2"


def test_a_requested_stop_is_shown_while_the_step_still_runs(panel: ProgressPanel) -> None:
    requests: list[str] = []
    panel.watch_stop(lambda: bool(requests))
    assert drawn(panel, 80)[0].startswith("epoch 2/2")
    requests.append("Ctrl-C")
    assert drawn(panel, 80)[0].startswith("stopping after this step ━")
    assert drawn(panel, 40)[0].startswith("stopping ━")


def test_before_the_first_step_the_panel_has_its_height_already() -> None:
    assert len(drawn(ProgressPanel(SIZE), 80)) == 6
    assert len(drawn(ProgressPanel(RunSize(8, 1, 5, ROWS[:1])), 80)) == 4


@pytest.mark.parametrize("width", [20, 39, 40, 69, 70, 110, 160, 200])
def test_no_line_is_wider_than_the_terminal(panel: ProgressPanel, width: int) -> None:
    lines = drawn(panel, width)
    assert len(lines) == 6 and max(map(len, lines)) <= width
    assert lines[0].startswith("epoch 2/2") and "6/8" in lines[0] and "25 %" in lines[4]


def test_partitions_beyond_the_height_are_counted() -> None:
    panel = ProgressPanel(RunSize(8, 1))
    panel.utilization([0.5] * 40, 0.5, [None] * 40)
    lines = drawn(panel, 80, height=11)
    assert len(lines) < 11 and lines[-1] == "... and 37 more"


def test_single_steps_do_not_flicker() -> None:
    panel = ProgressPanel(RunSize(8, 1))
    panel.utilization([1.0], 0.0, [None])
    panel.utilization([0.0], 1.0, [None])
    assert "80 % busy" in drawn(panel, 80)[-1] and "bubble 20 %" in drawn(panel, 80)[3]


def live(width: int = 80) -> tuple[ProgressPanel, Console, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=24, legacy_windows=False)
    return ProgressPanel(SIZE, console), console, file


def taken(panel: ProgressPanel, file: io.StringIO) -> str:
    """What was written, with the next frame."""
    panel._screen.refresh()
    return written(file)


def written(file: io.StringIO) -> str:
    text = file.getvalue()
    file.seek(0)
    file.truncate(0)
    return text


def test_an_echoed_control_c_leaves_nothing_behind() -> None:
    """Full lines used to wrap with the echo, so that the first line of the frame was left standing."""
    panel, _, file = live()
    screen = Screen(80)
    with pytest.raises(KeyboardInterrupt), panel:
        show_steps(panel, last=3)
        screen.feed(taken(panel, file))
        screen.feed("^C")
        show_steps(panel, last=4)
        screen.feed(taken(panel, file))
        assert len([line for line in screen.lines if "elapsed" in line]) == 1
        assert not any("^C" in line for line in screen.lines)
        raise KeyboardInterrupt
    screen.feed(written(file))
    assert [line for line in screen.lines if line] == [
        "step 4/8 | epoch 1/2 | train loss 1.6786 | lr 0.001 | 120 samples/s | moved 3",
        "MiB | elapsed 0:08 | remaining 0:08",
    ]


def test_a_run_that_finishes_leaves_its_last_frame() -> None:
    panel, _, file = live()
    screen = Screen(80)
    with panel:
        show_steps(panel, last=8)
    screen.feed(written(file))
    assert [line.split()[0] for line in screen.lines if line] == ["epoch", "train", "eval", "120", "0", "1"]


@pytest.mark.parametrize("narrower", [20, 33, 60])
def test_a_frame_that_a_narrower_terminal_has_broken_is_cleared_as_a_whole(narrower: int) -> None:
    panel, console, file = live(100)
    with panel:
        show_steps(panel)
        # The terminal breaks the lines anew, and the cursor stays with its character: the first of the last line.
        frame = drawn(panel, 100)
        taken(panel, file)
        console.width = narrower
        screen = Screen(narrower)
        screen.feed("\n".join(line.ljust(100)[: len(line)] for line in frame))
        last_rows = -(-len(frame[-1]) // narrower)
        screen.feed("\r" + "\x1b[A" * (last_rows - 1))
        panel.print_status("narrower")
        screen.feed(written(file))
        lines = [line for line in screen.lines if line]
    assert lines[0] == "narrower" and len([line for line in lines if line.startswith("epoch")]) == 1
    assert len(lines) == 7


def test_log_lines_of_workers_appear_above_the_panel_and_none_is_lost() -> None:
    panel, _, file = live()
    screen = Screen(80)
    with panel:
        workers = [
            threading.Thread(target=lambda name=name: [panel.print_log(f"{name} {i}") for i in range(50)])
            for name in "ab"
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    screen.feed(written(file))
    lines = [line for line in screen.lines if line]
    assert sorted(lines[:100]) == sorted(f"{name} {i}" for name in "ab" for i in range(50))
    assert lines[100].startswith("epoch 1/2")


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(0, 80))
def test_a_sparkline_has_its_width_and_goes_from_low_to_high(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    assert set(line) <= set(BLOCKS)


def test_a_sparkline_follows_its_values() -> None:
    assert sparkline([0, 7, 3.5], 10) == "▁█▅"
    assert sparkline([1, 1, 1], 2) == "▁▁"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""
