from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.commands import check
from tests.support.command_line import Gpipe

OK = Row("links", Verdict.OK, "24.0 GB/s", {"gb_per_second": 24.0})
NOTE = Row("overlap", Verdict.NOTE, "0 % is hidden", {"hidden": 0.0}, "end other processes")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Machine], Any]]:
    """Instead of the real checks, which take time: two that find nothing to complain about."""
    quick: dict[str, Callable[[Machine], Any]] = {
        "links": lambda machine: [OK],
        "overlap": lambda machine: [NOTE],
    }
    monkeypatch.setattr(check, "CHECKS", quick)
    return quick


def test_the_result_is_one_json_document_with_the_environment(gpipe: Gpipe, checks: object) -> None:
    answer = gpipe("check", "devices=3", "--json")
    assert answer.code == 0, answer.err
    document = answer.json
    assert list(document) == [
        "verdict",
        "devices",
        "rows",
        "seconds",
        "command",
        "environment",
        "run_dir",
    ]
    assert document["rows"] == [
        {
            "name": "links",
            "verdict": "ok",
            "result": "24.0 GB/s",
            "figures": {"gb_per_second": 24.0},
            "to_do": "",
        },
        {
            "name": "overlap",
            "verdict": "note",
            "result": "0 % is hidden",
            "figures": {"hidden": 0.0},
            "to_do": "end other processes",
        },
    ]
    assert document["verdict"] == "note" and document["devices"] == ["cpu"] * 3
    assert document["command"] == "gpipe check devices=3" and "torch" in document["environment"]
    saved = json.loads((Path(document["run_dir"]) / "check.json").read_text())
    assert saved == {key: value for key, value in document.items() if key not in ("environment", "run_dir")}


def test_a_pipe_gets_a_plain_line_per_row_and_what_to_do_below_it(gpipe: Gpipe, checks: object) -> None:
    answer = gpipe("check", "run_dir=here")
    assert answer.out.splitlines()[:3] == [
        "ok       links    24.0 GB/s",
        "note     overlap  0 % is hidden",
        "         to do: end other processes",
    ]
    assert "run_dir   here" in answer.out and "torch     2." in answer.out
    assert answer.err.splitlines() == ["checking links", "checking overlap"]


def test_a_terminal_gets_a_table(gpipe: Gpipe, checks: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "dumb")  # no colors
    heading, *lines = gpipe("check").out.splitlines()
    assert heading.split() == ["verdict", "check", "result"]
    assert any("to do: end other processes" in line for line in lines)


def test_a_problem_ends_with_exit_code_1_after_the_result(
    gpipe: Gpipe, checks: dict[str, Callable[[Machine], Any]]
) -> None:
    def broken(machine: Machine) -> Iterator[Row]:
        raise RuntimeError("the driver is too old")
        yield

    checks["bits"] = broken
    answer = gpipe("check", "--json")
    assert answer.code == 1 and answer.json["verdict"] == "problem"
    assert [row["verdict"] for row in answer.json["rows"]] == ["ok", "note", "problem"]
    assert answer.json["rows"][2]["result"] == "RuntimeError: the driver is too old"
    last = answer.err.splitlines()[-1]
    assert last == "gpipe: error: 1 of 3 rows report a problem: bits; each row says what to do"


def test_ctrl_c_ends_the_command(gpipe: Gpipe, checks: dict[str, Callable[[Machine], Any]]) -> None:
    def interrupted(machine: Machine) -> list[Row]:
        os.kill(os.getpid(), signal.SIGINT)
        return [OK]

    checks["bits"] = interrupted
    answer = gpipe("check")
    assert (answer.code, answer.out) == (130, "")
    assert answer.err.splitlines()[-1] == "gpipe: stopped by Ctrl-C"
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("chunks=4", "unknown key 'chunks'; gpipe check does not have it; it belongs to gpipe train"),
        ("device=2", "unknown key 'device'; did you mean 'devices'?"),
        ("devices", "'devices' is neither a flag nor key=value; see `gpipe check --help`"),
        ("devices=", "devices=: must be auto, a number"),
        ("run_dir=", "run_dir=: give the name of a directory"),
        ("devices=0", "devices=0: must be auto, a number of devices or a list"),
        ("devices=1025", "devices=1025: must be at most 1024"),
        ("devices=all", "devices=all: must be auto, a number"),
        ("devices=[]", "devices=[]: expected a list of names or numbers"),
        ("devices=[cpu,]", "devices=[cpu,]: cannot be read"),
        ("devices=[tpu9]", "device 'tpu9' does not exist"),
        ("--dry-run", "unknown flag --dry-run"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    word: str, says: str, gpipe: Gpipe, checks: object
) -> None:
    answer = gpipe("check", word)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err and len(answer.err.splitlines()) == 1


def test_a_directory_in_use_is_refused_before_anything_runs(gpipe: Gpipe, checks: object) -> None:
    assert gpipe("check", "run_dir=here").code == 0
    answer = gpipe("check", "run_dir=here")
    assert answer.code == 2 and "run_dir=here: the directory exists and is not empty" in answer.err


def test_the_page_shows_the_rows_and_can_be_rebuilt(gpipe: Gpipe, checks: object) -> None:
    gpipe("check", "run_dir=here")
    page = Path("here/report.html")
    first = page.read_text(encoding="utf-8")
    assert "Check of the machine" in first and "end other processes" in first
    assert "gpipe check run_dir=here" in first and "gpipe profile" not in first
    page.unlink()
    assert gpipe("report", "here").code == 0
    assert page.read_text(encoding="utf-8") == first


@pytest.mark.slow
def test_this_machine_passes_its_own_check(gpipe: Gpipe) -> None:
    answer = gpipe("check", "devices=[cpu,cpu]", "--json")
    assert answer.code == 0, answer.err
    verdicts = {row["name"]: row["verdict"] for row in answer.json["rows"]}
    assert verdicts["ranks"] == "ok" and "problem" not in verdicts.values()
    # About a minute on an idle machine; other tests may share this one.
    assert answer.json["seconds"] < 180
