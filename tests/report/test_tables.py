from __future__ import annotations

import io
import re
import shlex

import pytest
import torch
from torch import nn

from gpipe_cli.report.model_tables import partition_rows, print_partitions
from gpipe_cli.report.tables import print_facts, print_rows

Captured = pytest.CaptureFixture[str]


def test_facts_are_two_columns_without_padding_at_the_end(capsys: Captured) -> None:
    print_facts("", {"loss": 0.25, "top1": 0.5, "run_dir": "x" * 300})
    assert capsys.readouterr().out == f"loss     0.25\ntop1     50.00 %\nrun_dir  {'x' * 300}\n"


def test_a_command_stays_one_line_on_a_narrow_terminal_whose_rows_cut_no_word(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["gpipe", "train", "resume=runs/train/mlp/20261116-124455", "'out=a  b'", "epochs=12"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    print_facts("", {"longer": " ".join(command)})
    (line,) = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert shlex.split(line) == ["longer", *shlex.split(" ".join(command))]
    rows = [line[start : start + 50].strip() for start in range(0, len(line), 50)]
    assert [word for row in rows for word in row.split()] == line.split()


def test_rows_stand_under_their_columns(capsys: Captured) -> None:
    print_rows("2 jobs, 1 failed", ("job", "loss", "result"), [(0, 0.5, "runs/x"), (1, None, "FAILED (2)")])
    assert capsys.readouterr().out.splitlines() == [
        "2 jobs, 1 failed",
        "job  loss  result",
        "0    0.5   runs/x",
        "1    -     FAILED (2)",
    ]


def test_text_from_outside_is_neither_markup_nor_control(capsys: Captured) -> None:
    print_rows("t", ("overrides",), [("[red]run_dir=\x1b[2Jx\ny",)])
    assert capsys.readouterr().out.splitlines()[-1] == "[red]run_dir=[2Jx y"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (40, ["jobs", "job  kind   name          loss"]),
        (28, ["jobs; no room for kind", "job  name          loss"]),
        (19, ["jobs; no room for", "kind, loss", "job  name"]),
    ],
)
def test_columns_give_way_on_a_narrow_terminal_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, width: int, lines: list[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")  # rich takes a dumb one for 80 wide
    rows = [(0, "short", "stem.layer.1", 0.5)]
    print_rows("jobs", ("job", "kind", "name", "loss"), rows, optional=("kind", "loss"))
    printed = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()]
    assert printed[:-1] == lines
    assert "stem.layer.1" in printed[-1]


def test_rows_that_do_not_fit_become_paragraphs_with_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpipe ls recipes` cut its columns to two characters and dropped the description in silence."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    columns = ("name", "expected", "minutes", "needs", "description")
    text = "gpipe train recipe=x: a small GPT on the bytes of sonnets."
    print_rows("recipes", columns, [("gpt_sonnets", "bits_per_token<=3.0", 5, None, text)])
    printed = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()]
    assert printed == [
        "recipes",
        "gpt_sonnets",
        "  expected bits_per_token<=3.0, minutes",
        "  5",
        "  gpipe train recipe=x: a small GPT on",
        "  the bytes of sonnets.",
    ]


def test_headings_are_folded_before_a_column_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setenv("TERM", "xterm")
    rows = [("stem", "77.07M", "154.14M")]
    print_rows("layers", ("layer", "forward FLOPs", "backward FLOPs"), rows, optional=("forward FLOPs",))
    printed = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()]
    assert printed[1:] == ["       forward  backward", "layer  FLOPs    FLOPs", "stem   77.07M   154.14M"]


def test_partitions_are_named_by_their_first_and_last_layer(capsys: Captured) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    rows = partition_rows(model, [2, 1], [torch.device("cpu")])
    assert rows == [
        {"partition": 0, "device": "cpu", "layers": 2, "first": "0", "last": "1", "parameters": 9},
        {"partition": 1, "device": "cpu", "layers": 1, "first": "2", "last": "2", "parameters": 4},
    ]
    print_partitions(rows)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "partition  device  layers  first  last  parameters",
        "0          cpu     2       0      1     9",
        "1          cpu     1       2      2     4",
    ]
