"""A metric of your own is a mean, and is not divided a second time, however samples are divided into batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_cli.build.step import metrics_of
from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.cross_entropy import CrossEntropy
from gpipe_cli.losses.measures import accuracy
from tests.support.command_line import Gpipe

EXAMPLE = Path(__file__).parents[2] / "examples" / "your_own_parts" / "myparts.py"
OUTPUT = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([0, 1, 2, 3, 0, 1, -100])


class Measured:
    def __init__(self, measure: Callable[[Tensor, Tensor], Any]) -> None:
        self._measure = measure

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return output.sum()

    def metrics(self, output: Tensor, target: Tensor) -> Any:
        return self._measure(output, target)


class Weighed(Measured):
    def row_weights(self, target: Tensor) -> Tensor:
        return (target >= 0).long()


def hits(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float()


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 1, 5)])
@pytest.mark.parametrize(
    "measure",
    [lambda o, t: hits(o, t).mean(), lambda o, t: hits(o, t).mean().item(), hits],
    ids=["mean", "number", "values"],
)
def test_a_mean_or_a_value_for_each_sample_gives_the_mean_over_all(
    measure: Any, sizes: tuple[int, ...]
) -> None:
    sums = metrics_of(Measured(lambda output, target: {"hits": measure(output, target)}))
    parts = [sums(*part) for part in zip(OUTPUT.split(sizes), TARGET.split(sizes), strict=True)]
    assert sum(part["hits"] for part in parts) / 7 == pytest.approx(hits(OUTPUT, TARGET).mean().item())


def test_rows_count_as_much_as_in_the_loss_and_a_mean_of_nothing_counts_nothing() -> None:
    sums = metrics_of(Weighed(lambda output, target: {"hits": hits(output, target)}))
    assert sums(OUTPUT, TARGET)["hits"] == hits(OUTPUT, TARGET)[:6].sum()
    assert sums(OUTPUT[6:], TARGET[6:]) == {"hits": 0.0}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            {"hits": torch.ones(3)},
            r"Measured.metrics: 'hits' must be a mean .* each of 7, not a tensor of shape \[3\]",
        ),
        ({"hits": "many"}, r"'hits' must be a mean over the samples or a value for each of 7, not a str"),
        ({"loss": 1.0}, r"'loss' is the name of another column of metrics.jsonl"),
        (0.5, r"must return a dict of names and values, not a float"),
    ],
)
def test_anything_else_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        metrics_of(Measured(lambda *_: value))(OUTPUT, TARGET)


def test_the_losses_of_gpipe_and_of_torch_keep_their_metrics() -> None:
    loss = CrossEntropy()
    assert metrics_of(loss) == loss.measure and metrics_of(torch.nn.NLLLoss()) is accuracy


def test_the_parts_of_the_example_train_together(gpipe: Gpipe, tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    words = (
        "model=mlp",
        "data=synthetic",
        "data.length=64",
        "data.shape=[8]",
        "batch_size=20",
        "epochs=2",
        "balance=uniform",
    )
    own = (
        "loss._target_=myparts.FocalLoss",
        "lr_schedule._target_=myparts.Triangle",
        "logger._target_=myparts.CsvLogger",
    )
    optimizer = (
        "optimizer._target_=myparts.Lion",
        "optimizer.lr=0.01",
        "optimizer.no_decay=[bias]",
        "ema=0.9",
    )
    answer = gpipe("train", *words, *own, *optimizer, "allow=[myparts]", "run_dir=run", "--json")
    assert answer.code == 0, answer.err
    summary = json.loads(answer.out)
    assert 0 <= summary["top1"] <= 1 and 0 < summary["distance_error"] < 10
    assert "eval/distance_error" in (tmp_path / "run" / "scores.csv").read_text()
    shown = (tmp_path / "myparts.py").read_text()
    for name in ("FocalLoss", "Lion", "Triangle", "CsvLogger"):
        assert f"class {name}" in shown
