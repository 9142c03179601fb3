from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpipe_cli.training.loop import Evaluated, Position
from gpipe_cli.training.rewind import rewind_metrics, rewind_snapshots

EVALUATED = Evaluated(step=4, epoch=0, loss=1.0, means={}, samples=1, lr=0.1, took=1.0, seconds=2.0)
ROWS = [
    *({"step": step, "split": "train"} for step in range(1, 5)),
    {"step": 4, "split": "eval"},
    *({"step": step, "split": "train"} for step in range(5, 8)),
]


@pytest.mark.parametrize(
    ("position", "kept"),
    [
        (Position(), 0),
        (Position(3), 3),
        (Position(4), 4),
        (Position(4, evaluation=EVALUATED), 5),
        (Position(6, evaluation=EVALUATED), 7),
        (Position(99, evaluation=EVALUATED), 8),
        (Position(7, evaluation=replace(EVALUATED, step=7)), 8),
    ],
)
@pytest.mark.parametrize("tail", ["", '{"step": 3, "split": "tr', "\n", '{"step": "x"}\n', "[1]\n", "\0\0\0"])
def test_rows_after_the_position_and_torn_ones_are_cut(
    tmp_path: Path, position: Position, kept: int, tail: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS) + tail)
    rewind_metrics(path, position)
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS[:kept]


def test_a_run_that_wrote_nothing_has_nothing_to_cut(tmp_path: Path) -> None:
    rewind_metrics(tmp_path / "metrics.jsonl", Position(3))
    assert not list(tmp_path.iterdir())


def test_snapshots_of_a_future_that_is_given_up_are_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    for name in (
        "step-00000003",
        "step-00000005",
        "step-00000007",
        "step-00000007.aside",
        "step-00000009.tmp",
        "own",
    ):
        (folder / name).mkdir(parents=True)
    assert rewind_snapshots(tmp_path, 5, folder / "step-00000005") == ["step-00000007.aside-2"]
    names = {"step-00000003", "step-00000005", "step-00000007.aside", "step-00000007.aside-2", "own"}
    assert {path.name for path in folder.iterdir()} == names
    rewind_snapshots(tmp_path, 0, None)
    assert not list(folder.glob("step-????????"))
