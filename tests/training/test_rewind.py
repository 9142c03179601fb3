from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpipe_cli.errors import RunError
from gpipe_cli.safe_files import UnsafeFile
from gpipe_cli.training.loop import Evaluated, Position
from gpipe_cli.training.rewind import LONGEST_ROW, cut_metrics, rewind_metrics, rewind_snapshots

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
@pytest.mark.parametrize(
    "tail", ["", '{"step": 3, "split": "tr', "\0\0\0", '\0\0": 3}\n{"step": 99, "split": "eval"}\n']
)
def test_rows_after_the_position_and_torn_ones_are_cut(
    tmp_path: Path, position: Position, kept: int, tail: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS) + tail)
    rewind_metrics(path, position)
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS[:kept]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[1]",
        "nonsense",
        '{"step": "x", "split": "train"}',
        '{"step": 1e999, "split": "train"}',
        '{"step": -1, "split": "train"}',
        '{"step": NaN, "split": "train"}',
        '{"step": true, "split": "train"}',
        f'{{"step": {10**400}, "split": "train"}}',
        f'{{"step": 1, "split": "train", "loss": {"[" * 40 + "]" * 40}}}',
        "[" * 10**5,
        '"' + "x" * LONGEST_ROW + '"',
    ],
)
@pytest.mark.parametrize("place", [0, 3, len(ROWS)])
def test_a_line_that_was_never_a_row_is_told_before_any_row_is_lost(
    tmp_path: Path, line: str, place: int
) -> None:
    """`step: 1e999` ended in an OverflowError; any other such line took every row after it along, in silence."""
    lines = [json.dumps(row) for row in ROWS]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{one}\n" for one in [*lines[:place], line, *lines[place:]]))
    before = path.read_bytes()
    with pytest.raises(RunError, match=rf"metrics.jsonl: line {place + 1} is no row of metrics: .*repair it"):
        rewind_metrics(path, Position(99))
    assert path.read_bytes() == before


@pytest.mark.parametrize("torn", ["\0\0\0\n", "\0"])
def test_a_torn_line_among_rows_that_are_kept_is_told(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(torn + "".join(f"{json.dumps(row)}\n" for row in ROWS))
    with pytest.raises(RunError, match="line 1 is no row of metrics: it is cut short"):
        rewind_metrics(path, Position(99))


def test_rows_are_cut_from_no_other_file(tmp_path: Path) -> None:
    """metrics.jsonl -> victim was cut to nothing, and written to."""
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    path = tmp_path / "metrics.jsonl"
    for link in (path.symlink_to, path.hardlink_to):
        link(victim)
        with pytest.raises(UnsafeFile, match="link"):
            cut_metrics(path, 0)
        path.unlink()
    assert victim.read_text() == "precious\n"


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
