from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.training.loop import EarlyStop, PatienceState
from tests.support.command_line import Gpipe
from tests.support.run_files import rows as metrics_rows

ALLOW = "allow=[tiny_for_tests]"


def evaluations_until_the_end(stop: EarlyStop, values: list[float]) -> int | None:
    waiting = None
    for step, value in enumerate(values, start=1):
        waiting = stop.after(value, step, waiting)
        if stop.reason(waiting):
            return step
    return None


@pytest.mark.parametrize(
    ("metric", "min_delta", "values", "ends"),
    [
        ("loss", 0.0, [3, 2, 2.5, 2], 4),
        ("loss", 0.0, [3, 2, 2.5, 1.9, 1.9], None),
        ("top1", 0.0, [0.5, 0.4, 0.5], 3),
        ("top1", 0.0, [0.5, 0.4, 0.6, 0.7], None),
        ("mean_absolute_error", 0.1, [3, 2.95, 2.91], 3),
        ("loss", 0.1, [3, 2.95, 2.85, 2.8, 2.78], 5),
    ],
)
def test_a_run_ends_after_evaluations_without_improvement(
    metric: str, min_delta: float, values: list[float], ends: int | None
) -> None:
    assert evaluations_until_the_end(EarlyStop(metric, 2, min_delta), values) == ends


def test_another_metric_starts_the_count_again_and_the_reason_says_what_counts() -> None:
    waiting = PatienceState("loss", 0.5, step=20, evaluations=3)
    assert EarlyStop("top1", 3).reason(waiting) is None
    assert EarlyStop("top1", 3).after(0.9, 30, waiting) == PatienceState("top1", 0.9, 30)
    assert EarlyStop("loss", 3).reason(waiting) == "3 evaluations without a loss better than 0.5 (step 20)"
    assert str(EarlyStop("loss", 1, 0.1).reason(waiting)).endswith("(step 20) by more than 0.1")


def eval_rows(run: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "samples_per_second")
    rows = metrics_rows(run)
    return [
        {key: value for key, value in row.items() if key not in timed}
        for row in rows
        if row["split"] == "eval"
    ]


@pytest.mark.slow
def test_a_run_that_stops_early_is_finished_and_a_resumed_one_continues_the_count(
    tiny: Gpipe, gpipe: Gpipe, tmp_path: Path
) -> None:
    """Also: evaluations between epochs, a best by another metric than the loss, and an average."""
    words = (
        "epochs=40",
        "eval_every=3",
        "early_stop.patience=3",
        "snapshot.monitor=top1",
        "snapshot.every=2",
        "snapshot.keep=9",
    )
    more = ("ema=0.9", "log.every=100", "lr_schedule=constant", "early_stop.min_delta=0.5")
    answer = tiny("train", *words, *more, "run_dir=whole")
    assert answer.code == 0, answer.err
    rows = eval_rows(tmp_path / "whole")
    assert [row["step"] for row in rows] == [3, 4, 6, 8]
    line = "3 evaluations without a top1 better than "
    assert f"stopped early at step 8 of 160: {line}" in answer.err
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["steps"] == 8 and summary["epochs"] == 2 and summary["stopped_early"].startswith(line)
    assert "early_stop.patience=6" in answer.out
    best = max(rows, key=lambda row: row["top1"])
    assert f"best_epoch          {best['epoch'] + 1} (step {best['step']}, top1 " in answer.out
    again = gpipe("train", "resume=whole", "epochs=50", ALLOW)
    assert again.code == 0 and "raise early_stop.patience to continue; gpipe changed nothing" in again.err

    assert tiny("train", *words, *more, "run_dir=broken").code == 0
    resumed = gpipe("train", "resume=broken/snapshots/step-00000004", ALLOW)
    assert resumed.code == 0 and "stopped early at step 8 of 160" in resumed.err
    assert eval_rows(tmp_path / "broken") == rows
    snapshots = [tmp_path / run / "snapshots" / "step-00000008" for run in ("whole", "broken")]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (snapshots[0] / name).read_bytes() == (snapshots[1] / name).read_bytes()


def test_patience_without_a_metric_is_refused(tiny: Gpipe) -> None:
    answer = tiny("train", "early_stop.patience=3", "snapshot.monitor=null")
    assert (
        answer.code == 2 and "early_stop.patience=3: needs a metric; set snapshot.monitor=loss" in answer.err
    )
