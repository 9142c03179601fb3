from __future__ import annotations

import pytest

from gpipe_cli import activity as module
from gpipe_cli.activity import Activity
from gpipe_cli.report.progress import ProgressLines, RunSize, ShownEvaluation


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Activity:
    """An activity that prints its first line at once, and another only after a long time."""
    monkeypatch.setattr(module, "FIRST_LINE", 0.0)
    monkeypatch.setattr(module, "FRAME", 1e6)
    monkeypatch.setattr(module, "LINE", 1e6)
    monkeypatch.setattr(module, "LINE_SHARE", 0.0)
    monkeypatch.setattr(module, "BRIEF", 0.0)
    activity = Activity()
    monkeypatch.setattr("gpipe_cli.report.progress.activity", activity)
    return activity


def test_a_pipe_gets_at_most_one_line_every_few_seconds(
    shown: Activity, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown.start("importing torch")
    shown.now("reading the data")
    assert capfd.readouterr().err == "importing torch, 0.0 s\n"
    monkeypatch.setattr(module, "LINE", 0.0)
    shown.start("starting again")
    shown.now(lambda: "measuring layer 7 of 30")
    assert capfd.readouterr().err == "starting again, 0.0 s\nmeasuring layer 7 of 30, 0.0 s\n"


def test_a_pipe_is_not_told_what_is_over_at_once(
    shown: Activity, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of a run had lines such as `building the engine, 0.0 s`."""
    monkeypatch.setattr(module, "BRIEF", 1e6)
    shown.start("building the engine")
    shown.now("writing report.html")
    assert capfd.readouterr().err == ""


def test_a_program_that_imports_gpipe_is_told_nothing(
    shown: Activity, capfd: pytest.CaptureFixture[str]
) -> None:
    shown.now("building the engine")
    assert capfd.readouterr().err == ""


def test_the_first_step_and_an_evaluation_say_that_they_run(
    shown: Activity, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINE", 0.0)
    shown.start("starting")
    lines = ProgressLines(RunSize(steps=1, epochs=1, eval_batches=9))
    with lines:
        lines.evaluating(0)
        lines.evaluating(1)
        lines.evaluated(ShownEvaluation(1, 0, 0.5, {}, 1.0))
    assert [line.rpartition(",")[0] for line in capfd.readouterr().err.splitlines()[:3]] == [
        "starting",
        "running the first step",
        "evaluating, mini-batch 0 of 9",
    ]
