"""The comparison of two checkouts, with made-up measurements instead of the harness."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import against
from benchmarks.harness import Candidate, SystemResult
from benchmarks.subject import _import_from

TOP = Path(__file__).parent.parent.parent


def fake(monkeypatch: pytest.MonkeyPatch, seconds: dict[Path | None, list[float]]) -> list[Candidate]:
    """Make each checkout take its own time; return the candidates that were measured."""
    measured: list[Candidate] = []

    def measure(case: str, candidates: Sequence[Candidate], *_: Any) -> list[SystemResult]:
        measured.extend(candidates)
        return [
            SystemResult(candidate.system, list(seconds[candidate.checkout]), squared_norm=4.0)
            for candidate in candidates
        ]

    monkeypatch.setattr(against, "measure", measure)
    monkeypatch.setenv("COLUMNS", "120")
    return measured


@pytest.fixture
def other(tmp_path: Path) -> Path:
    (tmp_path / "gpipe_cli").mkdir()
    (tmp_path / "gpipe_cli" / "__init__.py").touch()
    return tmp_path


def test_this_checkout_is_compared_with_another_round_by_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: Path
) -> None:
    measured = fake(monkeypatch, {TOP: [1.1, 11.0, 1.1], other: [1.0, 10.0, 1.0]})
    against.main([str(other), "--case", "mlp", "--rounds", "3"])
    assert [(candidate.system, candidate.checkout) for candidate in measured] == [
        ("gpipe", TOP),
        ("gpipe", other),
        ("1f1b", TOP),
        ("1f1b", other),
    ]
    out = capsys.readouterr().out
    assert out.count("1.100") == 8 and out.endswith(
        "slower: 2\n"
    )  # ratio, quartiles and best of both systems


def test_of_empty_layers_the_cost_of_an_action_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: Path
) -> None:
    fake(monkeypatch, {None: [0.001] * 2, TOP: [0.0026] * 2, other: [0.0042] * 2})
    against.main([str(other), "--case", "empty", "--system", "1f1b", "--rounds", "2"])
    out = capsys.readouterr().out
    assert "empty, 1f1b: 50.0 microseconds per action beyond plain here, 100.0 there" in out
    assert out.endswith("slower: 0\n")


@pytest.mark.parametrize(
    ("arguments", "says"), [(["/nowhere"], "has no gpipe_cli"), ([str(TOP), "--rounds", "1"], "at least 2")]
)
def test_what_cannot_be_compared_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    with pytest.raises(SystemExit):
        against.main(arguments)
    assert says in capsys.readouterr().err


def test_a_process_measures_the_checkout_it_was_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    _import_from(str(TOP))
    assert sys.path[0] == str(TOP)
    with pytest.raises(ModuleNotFoundError, match=f"{tmp_path} has no gpipe_cli"):
        _import_from(str(tmp_path))
