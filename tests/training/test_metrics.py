from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.training.metrics import MetricsFile, Tally, accuracy


def slowly(scores: list[list[int]], targets: list[int], first: int) -> float:
    """How many targets are among the `first` best scores, counted one by one."""
    return sum(
        sum(other > row[target] for other in row) < first for row, target in zip(scores, targets, strict=True)
    )


@given(st.data(), st.integers(1, 9), st.integers(1, 6))
def test_top1_and_top5_are_counted_right(data: st.DataObject, classes: int, samples: int) -> None:
    """Fewer than five classes included: then all are among the first five."""
    scores = [data.draw(st.permutations(range(classes))) for _ in range(samples)]
    targets = data.draw(st.lists(st.integers(0, classes - 1), min_size=samples, max_size=samples))
    assert accuracy(torch.tensor(scores).float(), torch.tensor(targets)) == {
        "top1": slowly(scores, targets, 1),
        "top5": slowly(scores, targets, 5),
    }


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.zeros(4, 1), torch.zeros(4, 1)),
        (torch.zeros(4, 3), torch.zeros(4)),
        (torch.zeros(4, 3), torch.zeros(4, 3)),
        (torch.zeros(4, 3, 2, 2), torch.zeros(4, 2, 2, dtype=torch.long)),
        ((torch.zeros(4, 3),), torch.zeros(4, dtype=torch.long)),
    ],
)
def test_nothing_is_counted_where_the_target_is_no_class_per_sample(
    output: object, target: torch.Tensor
) -> None:
    assert accuracy(output, target) == {}


def test_batches_weigh_by_their_samples() -> None:
    tally = Tally()
    tally.add(loss=1.0, samples=3, sums={"top1": 3.0})
    tally.add(loss=5.0, samples=1, sums={"top1": 0.0, "top5": 1.0})
    assert (tally.samples, tally.loss) == (4, 2.0)
    assert tally.means == {"top1": 0.75, "top5": 0.25}


def test_every_row_is_on_disk_at_once_and_a_file_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write({"step": 1, "loss": 1 / 3})
        assert json.loads(path.read_text()) == {"step": 1, "loss": 1 / 3}
    with MetricsFile(path) as metrics:
        metrics.write({"step": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
