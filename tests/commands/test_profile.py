from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Gpipe = Callable[..., Any]
QUICK = ("seconds=0", "data.size=8", "batch_size=8", "chunks=2")


def test_a_profile_has_a_row_per_layer_on_stdout_and_on_disk(gpipe: Gpipe) -> None:
    answer = gpipe("profile", *QUICK, "partitions=4", "--json")
    assert answer.code == 0, answer.err
    found = answer.json
    assert found["micro_batch"] == 4
    assert [row["index"] for row in found["layers"]] == list(range(10))
    assert [row["partition"] for row in found["layers"]] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert sum(row["share"] for row in found["layers"]) == pytest.approx(1)
    assert found["predicted_step_ms"] > 0 and 0 <= found["predicted_bubble"] < 1
    assert 1 <= found["predicted_speedup"] <= 4
    directory = Path(found["run_dir"])
    assert json.loads((directory / "profile.json").read_text())["layers"] == found["layers"]
    with (directory / "profile.csv").open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [row["name"] for row in found["layers"]]


def test_rows_are_sorted_and_cut_as_asked(gpipe: Gpipe) -> None:
    lines = gpipe("profile", *QUICK, "sort=memory", "top=3").out.splitlines()
    table = lines[2:5]
    saved = [float(line.split()[5]) for line in table]
    assert saved == sorted(saved, reverse=True)
    assert lines[5].startswith("micro_batch")
