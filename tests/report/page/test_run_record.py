from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpipe_cli.errors import RunError
from gpipe_cli.report.page.render import render_page
from gpipe_cli.report.page.run_record import MAX_CURVES, MAX_POINTS, CurvePoint, read_curves, read_run
from tests.report.page.runs import steps, write_profile, write_training

JSON_FILES = ("launch.json", "summary.json", "profile.json", "trace.json", "env.json", "check.json")
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_a_profile_is_read_whole(tmp_path: Path) -> None:
    run = read_run(write_profile(tmp_path))
    assert (run.command, run.problems, run.device_memory) == ("profile", (), 1000)
    assert [layer.name for layer in run.layers] == ["conv", "head"]
    assert run.measured is not None and run.ideal is not None
    assert len(run.measured.bars) == len(run.ideal.bars) == len(steps())
    assert (run.measured.bubble, run.ideal.bubble) == (0.25, 0.2)
    assert run.measured.milliseconds == 7
    assert run.partitions[0].memory == {"parameter": 40, "gradient": 40, "optimizer": 80, "activation": 160}
    assert run.partitions[1].layers == "1: conv"


def test_a_training_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(write_training(tmp_path))
    curves = {(curve.metric, curve.split): curve.points for curve in run.curves}
    assert (
        curves["loss", "eval"] == (CurvePoint(20, 20, 0.5, 0.5, 0.5),) and len(curves["loss", "train"]) == 20
    )
    assert run.commands == ("gpipe train",) and run.environment["devices"] == ["cpu"]
    assert run.next_commands["Evaluate it"] == f"gpipe eval run={tmp_path}"


def test_the_commands_name_a_run_whatever_its_directory_is_called(tmp_path: Path) -> None:
    """Its comma made several values of the name, which need -m."""
    (tmp_path / "a,b").mkdir()
    commands = read_run(write_training(tmp_path / "a,b")).next_commands
    (word,) = shlex.split(commands["Evaluate it"])[2:]
    (override,) = OverridesParser.create().parse_overrides([word])
    assert override.value() == str(tmp_path / "a,b") and not override.is_sweep_override()


def test_the_measured_memory_of_a_device_is_beside_the_estimate_of_its_partitions(tmp_path: Path) -> None:
    partitions = [
        {"partition": index, "device": "cuda:0", "device_peak_bytes": 3 * 2**20} for index in (0, 1)
    ]
    write_training(tmp_path, partitions=partitions)
    sizes = {"device": "cuda:0", "parameter_bytes": 2**20}
    launch = {"command": "train", "commands": ["gpipe train"], "partitions": [sizes] * 2}
    (tmp_path / "launch.json").write_text(json.dumps(launch), encoding="utf-8")
    run = read_run(tmp_path)
    assert [(usage.memory, usage.device_peak) for usage in run.partitions] == [
        ({"parameter": 2**20}, 3 * 2**20)
    ] * 2
    page = render_page([run])
    assert "measured peak of the whole device" in page and page.count("3.00 MiB") == 2
    assert "measured peak" not in render_page([read_run(write_profile(tmp_path / "cpu"))])


def test_the_median_step_is_drawn(tmp_path: Path) -> None:
    write_profile(tmp_path)
    events = [event for step in range(3) for event in steps(1, step)]
    for event in events:
        event["dur"] *= 1 + (event["args"]["step"] + 1) % 3  # lengths 2, 3 and 1
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    measured = read_run(tmp_path).measured
    assert measured is not None and measured.bars[0].milliseconds == 2


@pytest.mark.parametrize("words", ["nowhere", "."])
def test_what_is_no_run_is_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no such directory|not a run directory"):
        read_run(tmp_path / words)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[" * 100_000, b"7", b'{"x": ' + b"9" * 5000 + b"}"])
@pytest.mark.parametrize("name", JSON_FILES)
def test_a_damaged_file_is_a_note_in_the_page(name: str, content: bytes, tmp_path: Path) -> None:
    write_profile(tmp_path)
    write_training(tmp_path)
    (tmp_path / name).write_bytes(content)
    run = read_run(tmp_path)
    assert len(run.problems) == 1 and run.problems[0].startswith(f"{name}: ")
    assert run.problems[0] in render_page([run])


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    write_training(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 21, "split": "train", "loss": NaN, "lr": 0.2}\n[1]\n{"step":\n{"st')
    run = read_run(tmp_path)
    assert run.problems == ("metrics.jsonl: 2 damaged lines; the page leaves them out",)
    curves = {(curve.metric, curve.split): curve.points for curve in run.curves}
    assert curves["lr", "train"][-1] == CurvePoint(21, 21, 0.2, 0.2, 0.2)
    assert curves["loss", "train"][-1].last == 20


@pytest.mark.parametrize("name", [*JSON_FILES, "metrics.jsonl"])
@given(
    content=st.dictionaries(
        st.sampled_from(["layers", "timeline", "traceEvents", "partitions", "step", "rows"]), anything
    )
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_may_hold_anything(name: str, content: dict[str, Any], tmp_path: Path) -> None:
    write_profile(tmp_path)
    write_training(tmp_path)
    (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    assert render_page([read_run(tmp_path)]).startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("gpipe train chunks=8", ("gpipe train chunks=8",)),
        ("gpipe train; rm -rf ~", ("gpipe 'train;' rm -rf '~'",)),
        ("gpipe train\nrm x", ("gpipe train rm x",)),
        ("rm -rf ~", ()),
        ("gpipe 'train", ()),
    ],
)
def test_a_command_of_a_file_is_one_of_gpipe_or_none(
    command: str, shown: tuple[str, ...], tmp_path: Path
) -> None:
    assert read_run(write_training(tmp_path, command=command)).commands == shown


def test_an_unfinished_run_tells_how_far_it_came(tmp_path: Path) -> None:
    write_training(tmp_path)
    (tmp_path / "summary.json").unlink()
    assert "20, not finished" in render_page([read_run(tmp_path)])


def row(step: int, loss: float, **more: float) -> dict[str, Any]:
    return {"step": step, "split": "train", "loss": loss, **more}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5000))
def test_a_long_curve_keeps_its_extremes_and_its_ends(values: list[float]) -> None:
    (curve,) = read_curves(row(step, value) for step, value in enumerate(values))
    points = curve.points
    assert len(points) <= MAX_POINTS and list(points) == sorted(points)
    assert (points[0].first, points[-1].last) == (0, len(values) - 1)
    assert (min(point.low for point in points), max(point.high for point in points)) == (
        min(values),
        max(values),
    )
    assert all(before.last < after.first for before, after in pairwise(points))
    assert curve.best == (values.index(min(values)), min(values))


def test_the_points_of_a_long_curve_are_means() -> None:
    (curve,) = read_curves(row(step, float(step % 2)) for step in range(4 * MAX_POINTS))
    assert {(point.mean, point.low, point.high) for point in curve.points} == {(0.5, 0.0, 1.0)}


def test_a_row_contains_the_losses_since_the_row_before() -> None:
    (curve,) = read_curves([row(1, 5.0), row(10, 3.0, loss_mean=4.0, loss_min=2.0, loss_max=4.5)])
    assert curve.points == (CurvePoint(1, 1, 5.0, 5.0, 5.0), CurvePoint(10, 10, 4.0, 2.0, 4.5))


@pytest.mark.parametrize("damaged", [{}, {"loss_min": "x"}, {"loss_min": 9.0}, {"loss_mean": float("nan")}])
def test_a_window_that_cannot_be_is_ignored(damaged: dict[str, Any]) -> None:
    window = {} if not damaged else {"loss_mean": 4.0, "loss_min": 2.0, "loss_max": 4.5, **damaged}
    (curve,) = read_curves([row(10, 3.0, **window)])
    assert curve.points == (CurvePoint(10, 10, 3.0, 3.0, 3.0),)


def test_a_file_of_many_names_has_few_curves() -> None:
    assert len(read_curves([row(1, 1.0, **{f"metric {index}": 1.0 for index in range(10**4)})])) == MAX_CURVES
