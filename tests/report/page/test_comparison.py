"""Comparisons: labels, order and best run, and charts that one diverged run does not flatten."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.report.page.charts import LogScale, Scale, comparison_charts, run_line
from gpipe_cli.report.page.comparison import Comparison
from gpipe_cli.report.page.run_record import RunRecord, read_run


def write_run(directory: Path, config: str, losses: list[float], **more: Any) -> RunRecord:
    """A run with one evaluation per loss."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(config, encoding="utf-8")
    rows = [
        {"step": step, "split": "eval", "loss": loss, **more} for step, loss in enumerate(losses, start=1)
    ]
    (directory / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8"
    )
    return read_run(directory)


def compare(runs: list[RunRecord]) -> Comparison:
    return Comparison.of(runs, [{} for _ in runs])


def optimizer(lr: float, name: str = "SGD") -> str:
    return f"optimizer:\n  _target_: torch.optim.{name}\n  lr: {lr}\nchunks: 4\nrun_dir: null\n"


def test_runs_are_named_by_what_differs_and_the_best_comes_first(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", optimizer(0.1), [0.9, 0.5, 0.6]),
        write_run(tmp_path / "b", optimizer(0.2, "Adam"), [0.9, 0.4]),
        write_run(tmp_path / "c", optimizer(0.3), []),
    ]
    comparison = compare(runs)
    assert comparison.labels == ["optimizer=Adam lr=0.2", "optimizer=SGD lr=0.1", "optimizer=SGD lr=0.3"]
    assert comparison.values == [0.4, 0.5, None] and comparison.best == 0
    assert comparison.folder == str(tmp_path)


def test_a_metric_that_should_be_high_ranks_the_other_way(tmp_path: Path) -> None:
    config = "seed: {}\nsnapshot:\n  monitor: top1\n"
    runs = [
        write_run(tmp_path / "a", config.format(1), [0.1], top1=0.2),
        write_run(tmp_path / "b", config.format(2), [0.2], top1=0.7),
    ]
    comparison = compare(runs)
    assert comparison.metric == "top1" and comparison.labels == ["seed=2", "seed=1"]


def test_labels_stay_distinct_where_settings_are_equal_too_long_or_unknown(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", "seed: 1\n", [1.0]),
        write_run(tmp_path / "b", "seed: 1\n", [2.0]),
        write_run(tmp_path / "c", f"seed: {'9' * 200}\n", [3.0]),
        write_run(tmp_path / "d", "", [4.0]),
    ]
    labels = compare(runs).labels
    assert labels == ["seed=1 (a)", "seed=1 (b)", str(tmp_path / "c"), str(tmp_path / "d")]


def test_keys_of_one_name_are_written_out(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / str(value), f"model:\n  width: {value}\ndata:\n  width: {value}\n", [1.0])
        for value in (1, 2)
    ]
    assert compare(runs).labels[0] == "model.width=1 data.width=1"


def test_twenty_runs_have_lines_of_their_own() -> None:
    assert len({run_line(index, "").css_class for index in range(20)}) == 20


def heights(page: str) -> list[list[float]]:
    """The vertical positions of each line, from 0 at the top to 1000."""
    return [
        [float(point.split(",")[1]) for point in points.split()]
        for points in re.findall(r'<polyline [^>]*points="([^"]*)"', page)
    ]


@pytest.mark.parametrize("others", [1, 19])
def test_a_run_that_diverged_does_not_flatten_the_others(tmp_path: Path, others: int) -> None:
    good = [
        write_run(tmp_path / str(index), f"seed: {index}\n", [2.3, 1.0, 0.2 + index / 100])
        for index in range(others)
    ]
    diverged = write_run(tmp_path / "diverged", "seed: 99\n", [2.5, 1e4, 1e9])
    comparison = compare([diverged, *good])
    (chart,) = comparison_charts(comparison.runs, comparison.labels, comparison.best)
    assert re.search(r"values above [\d.]+ are cut off \(1 run\)", chart)
    *lines, last = heights(chart)
    assert all(max(line) - min(line) > 600 for line in lines) and min(last) > 0
    assert "1e+09" in chart, "the pointer shows the value itself"


def test_runs_that_are_much_worse_get_a_logarithmic_scale_and_none_is_cut_off(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "good", "seed: 1\n", [0.2, 0.1]),
        write_run(tmp_path / "bad", "seed: 2\n", [2.0, 1.9]),
    ]
    (chart,) = comparison_charts(runs, ["good", "bad"], 0)
    assert "logarithmic scale" in chart and "cut off" not in chart


@pytest.mark.parametrize("losses", [[0.0, 0.0], [1.0, 1.0], [-3.0, 5.0], [1e-300, 1e90]])
def test_no_values_break_a_chart(tmp_path: Path, losses: list[float]) -> None:
    runs = [
        write_run(tmp_path / "a", "seed: 1\n", losses),
        write_run(tmp_path / "b", "seed: 2\n", losses[:1]),
        write_run(tmp_path / "c", "seed: 3\n", [1e80]),
    ]
    (chart,) = comparison_charts(runs, ["a", "b", "c"], None)
    assert "nan" not in chart and "inf" not in chart


def test_logarithmic_ticks_are_few_and_within() -> None:
    assert LogScale(0.1, 5.0).ticks() == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5])
    for scale in (LogScale(1e-190, 1e90), LogScale(0.5, 3e4)):
        ticks = scale.ticks()
        assert 2 <= len(ticks) <= 8 and all(0 <= scale.share(tick) <= 1 for tick in ticks)
    assert Scale(0, 1).share(0.5) == 0.5
