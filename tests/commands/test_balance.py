from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Gpipe = Callable[..., Any]


@pytest.mark.parametrize("by", ["time", "size", "params", "uniform"])
def test_a_balance_covers_the_model_and_can_be_pasted(gpipe: Gpipe, tmp_path: Path, by: str) -> None:
    quick = ["balance.seconds=0"] if by == "time" else []
    words = ["data.size=8", "batch_size=8", "partitions=3", *quick]
    found = gpipe("balance", "--by", by, *words, "--json").json
    assert {"balance", "by", "costs", "max", "lower_bound", "imbalance"} <= found.keys()
    assert found["by"] == by
    assert len(found["balance"]) == 3 and sum(found["balance"]) == len(found["costs"]) == 10
    assert found["max"] >= found["lower_bound"] > 0 and found["imbalance"] >= 1
    pasted = gpipe("train", *found["paste"].split(), "--dry-run", "--json").json
    assert [row["layers"] for row in pasted["partitions"]] == found["balance"]
    assert not (tmp_path / "runs").exists()


def test_the_table_shows_every_partition_and_the_line_to_paste(gpipe: Gpipe) -> None:
    out = gpipe("balance", "--by", "params", "partitions=3").out
    assert "balance=manual balance.layers=[7,1,2]" in out
    assert "imbalance" in out and "lower_bound" in out and "share" in out


def test_training_balances_on_the_fly(gpipe: Gpipe) -> None:
    words = ["balance=time", "balance.seconds=0", "data.size=8", "batch_size=8", "steps=1", "threads=1"]
    assert gpipe("train", *words, "--json").code == 0
