"""What a training run writes for its page, with every engine, and that it costs the run nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.data.datasets import Data, ImageSamples
from gpipe_cli.data.transforms import Transforms
from gpipe_cli.distributed.world import World
from gpipe_cli.report.page.predictions import as_png_uri
from gpipe_cli.runs import page_files
from gpipe_cli.runs.confusion_matrix import MAX_CLASSES, EvalObserver, predictions_json
from tests.support.command_line import Gpipe


def content(run: str, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(run, name).read_text())
    return facts


@pytest.mark.parametrize(
    "words",
    [
        ["engine=threads"],
        ["engine=single"],
        pytest.param(["engine=offload"], marks=pytest.mark.slow),
        pytest.param(["engine=threads", "engine.offload=cpu"], marks=pytest.mark.slow),
    ],
)
def test_a_run_writes_its_layers_an_early_step_and_its_predictions(tiny: Gpipe, words: list[str]) -> None:
    summary = tiny("train", "--json", "log.predictions=true", *words).json
    run = summary["run_dir"]
    predictions = content(run, "predictions.json")
    counts = torch.tensor(predictions["counts"])
    assert predictions["step"] == summary["steps"]
    assert float(counts.diagonal().sum() / counts.sum()) == pytest.approx(summary["top1"])
    assert predictions["samples"] and all(as_png_uri(sample["image"]) for sample in predictions["samples"])
    layers = content(run, "layers.json")["layers"]
    assert len(layers) == 8 and {"name", "type", "partition", "parameters"} <= layers[0].keys()
    if words == ["engine=single"]:
        assert not Path(run, "trace.json").exists()
    else:
        timeline = content(run, "timeline.json")
        assert timeline["step"] == 3 and 0 <= timeline["bubble"] < 1
        is_sliced = words == ["engine=offload"]
        assert is_sliced or all(0 < row["busy"] <= 1 for row in timeline["partitions"])
        assert is_sliced == ("partitions" not in timeline)


@pytest.mark.slow
def test_replicas_in_processes_count_together(tiny: Gpipe) -> None:
    words = ("train", "--json", "threads=1", "epochs=1", "log.predictions=true")
    alone, ranks = (
        content(tiny(*words, *more).json["run_dir"], "predictions.json")
        for more in ([], ["engine=processes", "data_parallel=2"])
    )
    assert ranks["counts"] == alone["counts"]
    shown = {sample["index"]: (sample["target"], sample["predicted"]) for sample in alone["samples"]}
    assert ranks["samples"] and all(
        shown.get(sample["index"], (sample["target"], sample["predicted"]))
        == (sample["target"], sample["predicted"])
        for sample in ranks["samples"]
    )


def test_the_predicted_step_is_beside_the_measured_one_where_times_are_known(tiny: Gpipe) -> None:
    run = tiny(
        "train", "--json", "balance.measure=always", "balance.seconds=0.01", "balance.cache=false"
    ).json["run_dir"]
    assert content(run, "layers.json")["layers"][0]["forward_ms"] > 0
    assert content(run, "timeline.json")["ideal_step_ms"] > 0
    assert {event["pid"] for event in content(run, "trace.json")["traceEvents"]} == {1, 2}


def test_a_page_that_cannot_be_made_costs_one_line(tiny: Gpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no layers today")

    monkeypatch.setattr(page_files, "predictions_json", fails)
    answer = tiny("train", "epochs=2", "log.predictions=true")
    assert answer.code == 0
    assert (
        answer.err.count("warning: the page of the run will lack predictions: ValueError: no layers today")
        == 1
    )


def loader(classes: int = 3, names: tuple[str, ...] | None = None) -> BatchLoader:
    images = torch.arange(6 * 3 * 8 * 8).reshape(6, 3, 8, 8).to(torch.uint8)
    samples = ImageSamples(images, torch.tensor([0, 1, 2, 0, 1, 2]))
    data = Data(samples, samples, classes, (3, 8, 8), class_names=names)
    return BatchLoader(data, Transforms(None, None), classes, batch_size=6, seed=0)


def scores(*classes: int, width: int = 3) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes), width).float()


def test_an_observer_counts_pairs_over_all_batches_and_starts_again() -> None:
    observer = EvalObserver(loader())
    observer(scores(0, 2, 2), torch.tensor([0, 1, 2]))
    observer({"out": scores(1, 0), "aux": scores(0, 0)}, torch.tensor([1, -100]))
    observed = observer.take(World())
    assert observed is not None and observed.counts.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert [sample["predicted"] for sample in observed.samples] == [2, 0, 1, 2]
    assert observer.take(World()) is None


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.randn(4), torch.randn(4)),
        (torch.randn(4, 1), torch.zeros(4, dtype=torch.int64)),
        (torch.randn(2, MAX_CLASSES + 1), torch.zeros(2, dtype=torch.int64)),
        ("text", torch.zeros(4, dtype=torch.int64)),
        ((), torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_what_is_no_classification_is_not_counted(output: Any, target: Tensor) -> None:
    observer = EvalObserver(loader())
    observer(output, target)
    assert observer.take(World()) is None


def test_wrong_predictions_come_first_and_carry_names_and_images() -> None:
    data = loader(names=("cat", "dog", "<b>"))
    observer = EvalObserver(data)
    observer(scores(0, 1, 0, 0, 1, 1), torch.tensor([0, 1, 2, 0, 1, 2]))
    observed = observer.take(World())
    assert observed is not None
    facts = predictions_json(observed, data, step=7)
    assert facts["class_names"] == ["cat", "dog", "<b>"] and facts["step"] == 7
    assert [sample["index"] for sample in facts["samples"]] == [2, 5, 0, 1, 3, 4]


def test_samples_are_of_all_classes_and_of_each_the_most_confident_errors_come_first() -> None:
    """A folder of images lists one class after the other, so the first samples are all of one class."""
    observer = EvalObserver(loader())
    targets = [0] * 12 + [1] * 6 + [2] * 6
    sure = {3: 9.0, 8: 8.0, 20: 3.0}  # errors; others are right
    for first in range(0, 24, 6):
        own = targets[first : first + 6]
        rows = scores(*((label + (first + row in sure)) % 3 for row, label in enumerate(own)))
        factors = torch.tensor([sure.get(first + row, 1 + row / 10) for row in range(6)])
        observer(rows * factors.unsqueeze(1), torch.tensor(own))
    observed = observer.take(World())
    assert observed is not None
    shown = [sample["index"] for sample in observed.samples][:12]
    assert shown[:3] == [3, 20, 8]
    assert {targets[index] for index in shown[3:6]} == {targets[index] for index in shown[6:9]} == {0, 1, 2}
    assert observer.take(World()) is None


def test_of_many_classes_only_the_most_confused_pairs_are_written() -> None:
    observer = EvalObserver(loader())
    observer(scores(7, 7, 8, width=200), torch.tensor([3, 3, 8]))
    observed = observer.take(World())
    assert observed is not None
    facts = predictions_json(observed, loader(), step=1)
    assert facts["pairs"] == [{"target": 3, "predicted": 7, "count": 2}] and "counts" not in facts


def test_masks_become_images() -> None:
    observer = EvalObserver(loader())
    observer(torch.randn(2, 3, 300, 200), torch.randint(3, (2, 300, 200)))
    observed = observer.take(World())
    assert observed is not None and int(observed.counts.sum()) == 2 * 300 * 200
    (first, _) = predictions_json(observed, loader(), step=1)["samples"]
    assert all(as_png_uri(first[name]) for name in ("image", "target_image", "predicted_image"))
