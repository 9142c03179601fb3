from __future__ import annotations

import json
from pathlib import Path

from gpipe_cli.training.metrics import MetricsFile, Tally


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
