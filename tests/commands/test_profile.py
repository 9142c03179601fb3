from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.support.command_line import Gpipe

QUICK = ("seconds=0", "balance.seconds=0", "data.size=8", "batch_size=8", "chunks=2")


def test_a_profile_has_a_row_per_layer_on_stdout_and_on_disk(gpipe: Gpipe) -> None:
    answer = gpipe("profile", *QUICK, "partitions=4", "--json")
    assert answer.code == 0, answer.err
    summary = answer.json
    assert summary["micro_batch"] == 4
    assert [row["index"] for row in summary["layers"]] == list(range(10))
    partitions = [row["partition"] for row in summary["layers"]]
    assert partitions == sorted(partitions) and {*partitions} == {0, 1, 2, 3}
    assert sum(row["share"] for row in summary["layers"]) == pytest.approx(1)
    assert summary["predicted_step_ms"] > 0 and 0 <= summary["predicted_bubble"] < 1
    assert 1 <= summary["predicted_speedup"] <= 4
    directory = Path(summary["run_dir"])
    assert json.loads((directory / "profile.json").read_text())["layers"] == summary["layers"]
    with (directory / "profile.csv").open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [row["name"] for row in summary["layers"]]


def test_a_matrix_that_layers_share_counts_once_in_totals(gpipe: Gpipe) -> None:
    """gpt had 830,208 parameters in `gpipe ls` and 862,976 in its profile, where the head shares the embedding."""
    profile = gpipe("profile", "model=gpt", "measure=false", "balance=params", "partitions=1", "--json").json
    assert profile["parameters"] == 830_208 and profile["parameter_bytes"] == 4 * 830_208
    assert sum(layer["parameters"] for layer in profile["layers"]) == 830_208 + 256 * 128
    told = gpipe("train", "model=gpt", "balance=params", "partitions=1", "--dry-run", "--json").json
    assert told["partitions"][0]["parameters"] == 830_208


def test_a_profile_divides_the_model_as_training_does(gpipe: Gpipe) -> None:
    """It divided into equal numbers of layers, found that uneven, and advised what training does anyway."""
    default = "\nbalance:\n  _target_: gpipe_cli.balance.time.balance\n"
    assert all(default in gpipe(command, "--cfg", "job").out for command in ("train", "profile"))
    assert "balance [" in gpipe("profile", *QUICK, "--dry-run").err


def test_rows_are_sorted_and_limited_as_configured(gpipe: Gpipe) -> None:
    title, heading, *lines = gpipe("profile", *QUICK, "sort=memory", "top=3").out.splitlines()
    assert title == "3 of 10 layers (top=null shows them all)"
    columns = "layer name type partition parameters bytes saved output forward ms backward ms share of time"
    assert " ".join(heading.split()) == columns
    saved = [float(line.split()[7]) for line in lines[:3]]
    assert saved == sorted(saved, reverse=True)
    assert lines[3].startswith("micro_batch")


def test_a_model_larger_than_memory_is_profiled_without_measuring(huge: Gpipe) -> None:
    answer = huge("profile", "measure=false", "batch_size=8", "chunks=2", "balance=params", "--json")
    assert answer.code == 0, answer.err
    summary = answer.json
    assert summary["parameter_bytes"] > 100e9
    assert summary["layers"][2] == {
        "index": 2,
        "name": "2",
        "type": "Linear",
        "parameters": 80_000 * 80_001,
        "parameter_bytes": 4 * 80_000 * 80_001,
        "saved_bytes": 4 * 4 * 80_000,
        "output_shape": [[4, 80_000]],
        "output_bytes": 4 * 4 * 80_000,
        "forward_flops": 2 * 4 * 80_000**2,
        "backward_flops": 4 * 4 * 80_000**2,
        "partition": 0,
        "share": pytest.approx(1 / 4, rel=0.01),
    }
    assert "forward_ms" not in summary and "predicted_step_ms" not in summary
    written = (
        "profile.json profile.csv report.html launch.json config.yaml paths.json overrides.yaml env.json"
    )
    assert {path.name for path in Path(summary["run_dir"]).iterdir()} == {*written.split()}
    shown = huge("profile", "measure=false", "sort=time", "top=1")
    assert "forward FLOPs" in shown.out and "23.84 GiB" in shown.out


def test_a_model_without_storage_is_balanced_by_flops_unless_it_must_be_measured(huge: Gpipe) -> None:
    assert huge("profile", "measure=false", "balance=time").code == 0
    answer = huge("profile", "measure=false", "balance=time", "balance.measure=always")
    assert answer.code == 2
    assert "balance=time: nothing is run here" in answer.err and "gpipe balance --by time" in answer.err


def test_a_timeline_is_recorded_drawn_and_analysed(tiny: Gpipe) -> None:
    answer = tiny("profile", "seconds=0", "timeline=true", "steps=2", "partitions=2")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    ideal = next(index for index, line in enumerate(lines) if line.startswith("ideal: "))
    assert lines[ideal + 1].startswith("0 F") and lines[ideal + 3].startswith("measured: ")
    heading = next(line for line in lines if line.startswith("partition  busy"))
    assert "waiting ms" in heading and "peak saved" in heading
    assert any(line.startswith("bottleneck  partition ") for line in lines)
    (directory,) = Path("runs/profile/build").iterdir()
    timeline = json.loads((directory / "profile.json").read_text())["timeline"]
    assert timeline["step_ms"] > 0 and 0 <= timeline["bubble"] < 1 and timeline["advice"]
    assert [row["partition"] for row in timeline["partitions"]] == [0, 1]
    assert all(row["peak_saved_bytes"] > 0 and 0 < row["busy"] <= 1 for row in timeline["partitions"])
    trace = json.loads((directory / "trace.json").read_text())["traceEvents"]
    assert {"F0", "R0", "B2"} <= {event["name"] for event in trace}


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        (("engine.offload=disk", "partitions=2"), [1, 1]),
        # There and back, except for the last slice.
        (("engine=offload", "engine.to=disk", "engine.slices=3"), [2, 2, 1]),
    ],
)
def test_a_timeline_shows_the_transfers_of_offloaded_partitions(
    words: tuple[str, ...], stays: list[int], tiny: Gpipe
) -> None:
    answer = tiny("profile", "seconds=0", "timeline=true", "steps=2", *words, "--json").json
    assert len(answer["timeline"]["partitions"]) == len(stays)
    events = json.loads((Path(answer["run_dir"]) / "trace.json").read_text())["traceEvents"]
    for phase in ("load", "drop"):
        summary = [event for event in events if event.get("cat") == phase]
        assert {event["name"] for event in summary} == {phase}
        assert sorted((event["tid"], event["args"]["step"]) for event in summary) == [
            (index, step) for index, count in enumerate(stays) for step in (0, 1) for _ in range(count)
        ]


def test_a_timeline_needs_a_model_that_runs(gpipe: Gpipe) -> None:
    answer = gpipe("profile", "timeline=true", "measure=false")
    assert (answer.code, answer.out) == (2, "")
    assert "timeline=true: runs the model, but measure=false runs nothing" in answer.err


def test_the_kernels_of_a_step_are_recorded_in_all_threads(tiny: Gpipe, tmp_path: Path) -> None:
    answer = tiny(
        "profile", "kernels=true", "partitions=2", "seconds=0", f"run_dir={tmp_path / 'run'}", "--json"
    )
    assert answer.code == 0, answer.err
    assert answer.json["kernels"] == str(tmp_path / "run" / "kernels.json")
    events = json.loads((tmp_path / "run" / "kernels.json").read_text())["traceEvents"]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    assert {"aten::addmm", "aten::mm"} <= {event["name"] for event in operators}
    assert len({event["tid"] for event in operators}) >= 2, "one thread for each partition"
    assert not (tmp_path / "run" / "memory_snapshot.json").exists(), "there is no GPU"
