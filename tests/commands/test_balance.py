from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gpipe_cli.values import parse_bytes
from tests.support.command_line import Gpipe


@pytest.mark.parametrize("by", ["time", "size", "params", "uniform"])
def test_a_balance_covers_the_model_and_can_be_pasted(gpipe: Gpipe, tmp_path: Path, by: str) -> None:
    quick = ["balance.seconds=0"] if by == "time" else []
    # With a last mini-batch of several samples: gpipe train would refuse a single one for batch norm.
    words = ["data.size=8", "batch_size=16", "partitions=3", *quick]
    summary = gpipe("balance", "--by", by, *words, "--json").json
    assert {"balance", "by", "costs", "max", "lower_bound", "imbalance"} <= summary.keys()
    assert summary["by"] == by
    assert len(summary["balance"]) == 3 and sum(summary["balance"]) == len(summary["costs"]) == 10
    assert summary["max"] >= summary["lower_bound"] > 0 and summary["imbalance"] >= 1
    pasted = gpipe(*shlex.split(summary["train_command"])[1:], "--dry-run", "--json").json
    assert [row["layers"] for row in pasted["partitions"]] == summary["balance"]
    assert summary["paste"] == summary["train_command"], "the former name of the key"
    assert not (tmp_path / "runs").exists()


def test_the_table_shows_every_partition_and_the_line_to_paste(gpipe: Gpipe) -> None:
    out = gpipe("balance", "--by", "params", "partitions=3").out
    assert "gpipe train partitions=3 balance=manual 'balance.layers=[7,1,2]'" in out
    assert all(word in out for word in ("imbalance", "lower_bound", "share", "memory", "MiB"))


def test_a_memory_limit_is_kept_by_every_method(tiny: Gpipe) -> None:
    words = ["partitions=3", "--json"]
    uniform = tiny("balance", "--by", "uniform", *words).json
    limit = int(0.99 * max(uniform["memory_bytes"]))
    summary = tiny("balance", "--by", "uniform", f"device_memory={limit}", *words).json
    assert summary["balance"] != uniform["balance"]
    assert max(summary["memory_bytes"]) <= limit
    trained = tiny("train", f"device_memory={limit}", *words, "--dry-run").json
    assert [row["layers"] for row in trained["partitions"]] == summary["balance"]


@pytest.mark.parametrize("words", [["schedule=1f1b"], ["checkpoint=never", "optimizer=sgd"]])
def test_a_dry_run_estimates_the_same_memory(tiny: Gpipe, words: list[str]) -> None:
    words = [*words, "partitions=3", "--json"]
    summary = tiny("balance", "--by", "params", *words).json
    rows = tiny("train", "--dry-run", "balance=params", *words).json["partitions"]
    assert [row["total_bytes"] for row in rows] == summary["memory_bytes"]


def test_the_smallest_sufficient_limit_in_the_error_is_sufficient(tiny: Gpipe) -> None:
    words = ["--by", "params"]
    refused = tiny("balance", *words, "device_memory=1KiB").err
    smallest = refused.partition("the smallest limit that works is ")[2].partition(",")[0]
    assert tiny("balance", *words, f"device_memory={smallest}").code == 0
    by_size = tiny("balance", "--by", "size", "--json").json
    assert by_size["max"] == by_size["lower_bound"] == max(by_size["memory_bytes"])
    assert by_size["max"] <= parse_bytes(smallest) <= 1.01 * by_size["max"]


def test_the_optimizer_the_schedule_and_the_checkpoint_mode_change_what_memory_is_needed(
    tiny: Gpipe,
) -> None:
    def most(*words: str) -> int:
        summary = tiny("balance", "--by", "size", "--json", *words).json
        return int(summary["max"])

    usual = most()
    assert most("optimizer=sgd") < usual
    assert most("checkpoint=never") > usual
    assert most("checkpoint=never", "schedule=1f1b") < most("checkpoint=never")


def test_large_numbers_of_parameters_have_a_unit(gpipe: Gpipe) -> None:
    """They were printed as `4.334e+05 parameters`."""
    out = gpipe("balance", "--by", "params", "model=mlp", "model.width=512").out
    assert re.search(r"max +\d+\.\d\d[kM] parameters", out) and "e+0" not in out
