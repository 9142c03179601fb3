"""Checks of overlap and speed-up: their judgement of figures, and that they run at all; no figure decides a test."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.check import speed
from gpipe_cli.check.row import Check, Machine, Verdict
from gpipe_cli.check.speed import (
    IDEAL,
    check_overlap,
    check_speed,
    judge_copies,
    judge_speed,
    judge_threads,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_CPU = Machine.of([CPU])


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "WIDTHS", (8,))


@pytest.mark.parametrize(("check", "figure"), [(check_overlap, "one_thread_ms"), (check_speed, "speed_up")])
def test_two_threads_and_two_partitions_of_a_cpu_are_timed(
    check: Check, figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "available_cores", lambda: 2)
    threads = torch.get_num_threads()
    (row,) = check(ON_CPU)
    assert row.figures[figure] > 0 and row.figures.get("ideal", 16 / 9) == pytest.approx(16 / 9)
    assert torch.get_num_threads() == threads


def test_one_core_has_nothing_to_overlap_or_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "available_cores", lambda: 1)
    assert [row.verdict for check in (check_overlap, check_speed) for row in check(ON_CPU)] == [
        Verdict.SKIPPED,
        Verdict.SKIPPED,
    ]


def test_one_accelerator_is_no_pipeline_of_two() -> None:
    (row,) = check_speed(Machine.of([GPU]))
    assert (row.verdict, row.result) == (Verdict.SKIPPED, "needs a second accelerator beside cuda:0")


@pytest.mark.parametrize(
    ("both", "hidden", "verdict"),
    [
        (0.010, 1.0, Verdict.OK),
        (0.0125, 0.75, Verdict.OK),
        (0.020, 0.0, Verdict.NOTE),
        (0.03, 0.0, Verdict.NOTE),
    ],
)
def test_copies_that_run_in_turn_with_kernels_are_a_note(
    both: float, hidden: float, verdict: Verdict
) -> None:
    row = judge_copies(GPU, 0.010, 0.010, both)
    assert row.verdict is verdict and row.figures["hidden"] == pytest.approx(hidden)
    assert ("CUDA_LAUNCH_BLOCKING" in row.to_do) == (verdict is Verdict.NOTE)


def test_threads_that_run_in_turn_are_a_note() -> None:
    assert judge_threads(0.01, 0.0105).verdict is Verdict.OK
    row = judge_threads(0.01, 0.02)
    assert row.verdict is Verdict.NOTE and "two physical cores" in row.to_do


@pytest.mark.parametrize(
    ("devices", "hint"), [([CPU, CPU], "end other processes"), ([GPU, GPU], "rows on links")]
)
def test_a_speed_up_below_what_the_schedule_allows_is_a_note(devices: list[torch.device], hint: str) -> None:
    assert judge_speed("speed-up", devices, IDEAL, 1.0).verdict is Verdict.OK
    row = judge_speed("speed-up", devices, 1.1, 1.0)
    assert (
        row.verdict is Verdict.NOTE
        and hint in row.to_do
        and row.result.startswith("1.10: a step takes 1000.0 ms")
    )
