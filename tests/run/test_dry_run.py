from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Gpipe = Callable[..., Any]


def test_a_dry_run_shows_the_partitions_and_writes_nothing(tiny: Gpipe, tmp_path: Path) -> None:
    answer = tiny("train", "--dry-run", "balance=manual", "balance.layers=[3,5]", "--json")
    first, second = answer.json["partitions"]
    assert (first["layers"], second["layers"], second["first"]) == (3, 5, "3")
    assert [row["name"] for row in answer.json["layers"]] == [str(index) for index in range(8)]
    # Twenty rows in three micro-batches: the largest has seven. The first layers give 4 channels of 6x6.
    assert (first["input_shapes"], second["input_shapes"]) == ([[7, 3, 8, 8]], [[7, 4, 6, 6]])
    assert second["input_bytes"] == 4 * 7 * 4 * 6 * 6
    assert not (tmp_path / "runs").exists()
    out = tiny("train", "--dry-run").out
    assert "memory, estimated" in out and "7x4x6x6" in out and "steps  8" in out


def test_memory_is_that_of_optimizer_schedule_and_checkpointing(tiny: Gpipe) -> None:
    def memory(*words: str) -> dict[str, int]:
        row: dict[str, int] = tiny("train", "--dry-run", *words, "--json").json["partitions"][0]
        return row

    adamw, sgd = memory("checkpoint=never"), memory("checkpoint=never", "optimizer=sgd")
    weights = adamw["parameters"] * 4
    assert adamw["gradient_bytes"] == weights
    assert adamw["optimizer_bytes"] == 2 * weights + 4 * 4  # and a count of steps for each of four tensors
    assert sgd["optimizer_bytes"] in (0, weights)
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
    assert adamw["total_bytes"] == sum(adamw[part] for part in parts)
    graph = adamw["activation_bytes"] // 3
    always = memory("checkpoint=always")["activation_bytes"]
    assert always == graph + 3 * adamw["input_bytes"]
    assert memory("checkpoint=never", "schedule=1f1b")["activation_bytes"] == 2 * graph
    assert memory("engine=single")["activation_bytes"] < 3 * graph


def test_a_dry_run_describes_a_model_larger_than_memory(huge: Gpipe, tmp_path: Path) -> None:
    answer = huge("train", "--dry-run", "partitions=4", "balance=params", "--json")
    assert answer.code == 0, answer.err
    assert sum(row["total_bytes"] for row in answer.json["partitions"]) > 400e9
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_without_estimates_still_shows_the_partitions(tiny: Gpipe, tmp_path: Path) -> None:
    (tmp_path / "looking_for_tests.py").write_text(
        "from torch import nn\n\n\n"
        "class Looking(nn.Module):\n"
        "    def forward(self, input):\n"
        "        return input * 2 if input.sum().item() > 0 else input\n\n\n"
        "def build(num_classes: int) -> nn.Sequential:\n"
        "    return nn.Sequential(nn.Flatten(), Looking(), nn.Linear(192, num_classes))\n"
    )
    own = ("model._target_=looking_for_tests.build", "allow=[looking_for_tests]")
    answer = tiny("train", "--dry-run", *own)
    assert answer.code == 0
    assert "shapes and memory are unknown: layer '1' (Looking) looks at the values" in answer.err
    assert "partition" in answer.out and "memory" not in answer.out


def test_a_layer_that_does_not_fit_is_reported_with_its_name(tiny: Gpipe) -> None:
    answer = tiny("train", "--dry-run", "data.shape=[3,9,9]")
    assert answer.code == 1
    assert "in layer '7' (Linear), without values" in answer.err


def test_the_memory_estimate_uses_the_precision_of_the_run(tiny: Gpipe) -> None:
    def saved(*words: str) -> int:
        rows = tiny("train", "--dry-run", *words, "--json").json["layers"]
        return int(rows[5]["saved_bytes"])

    assert saved("precision=bf16") == saved() // 2
