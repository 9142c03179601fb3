from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from gpipe_cli.profiling import profile_cache
from gpipe_cli.profiling.profile_cache import Drift
from gpipe_cli.profiling.records import LayerTimes
from tests.support.command_line import Gpipe, UserModule
from tests.support.run_files import rows, weights


def test_a_run_writes_everything_needed_to_repeat_and_analyse_it(tiny: Gpipe) -> None:
    answer = tiny("train", "--json", "seed=3")
    assert answer.code == 0
    summary = answer.json
    assert {"loss", "top1", "steps", "samples_per_second", "seconds", "run_dir", "command"} <= summary.keys()
    assert summary["steps"] == 8
    assert summary["command"].startswith("gpipe train ") and "seed=3" in summary["command"]
    directory = Path(summary["run_dir"])
    assert directory.parent == Path("runs/train/build")
    assert {path.name for path in directory.iterdir()} == {
        "config.yaml",
        "paths.json",
        "overrides.yaml",
        "env.json",
        "train.log",
        "metrics.jsonl",
        "summary.json",
        "snapshots",
        "inference.json",
        "launch.json",
        "layers.json",
        "trace.json",
        "timeline.json",
        "report.html",
    }
    assert json.loads((directory / "summary.json").read_text()) == summary
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    assert summary["run_bytes"] == pytest.approx(size, rel=0.2), (
        "without the last page and the summary itself"
    )
    assert json.loads((directory / "env.json").read_text())["torch"] == torch.__version__


def test_a_finished_run_keeps_its_last_snapshot_only_unless_it_is_told_how_many(tiny: Gpipe) -> None:
    def snapshots(*words: str) -> list[str]:
        assert tiny("train", "run_dir=run", "resume=auto", "snapshot.every=2", *words).code == 0
        return sorted(path.name[-1] for path in Path("run", "snapshots").glob("step-*"))

    assert snapshots("steps=6", "snapshot.keep=null") == ["6"]
    assert snapshots("steps=8", "snapshot.keep=2") == ["6", "8"]


def test_metrics_have_a_row_per_logged_step_and_one_per_evaluation(tiny: Gpipe) -> None:
    metrics = rows(tiny("train", "--json", "log.every=3").json["run_dir"])
    assert [(row["step"], row["split"]) for row in metrics] == [
        (1, "train"),
        (3, "train"),
        (4, "train"),
        (4, "eval"),
        (6, "train"),
        (8, "train"),
        (8, "eval"),
    ]
    keys = {"step", "epoch", "split", "loss", "top1", "lr", "samples_per_second", "seconds"}
    assert all(keys <= row.keys() for row in metrics)
    assert [row["epoch"] for row in metrics] == [0, 0, 0, 0, 1, 1, 1]


def test_the_rows_of_metrics_contain_mean_and_extremes_of_every_loss(tiny: Gpipe) -> None:
    every, some = (rows(tiny("train", "--json", f"log.every={count}").json["run_dir"]) for count in (1, 3))
    losses = {row["step"]: row["loss"] for row in every if row["split"] == "train"}
    first = 1
    for row in some:
        if row["split"] == "train":
            window = [losses[step] for step in range(first, row["step"] + 1)]
            assert row["loss"] == window[-1]
            assert row["loss_mean"] == pytest.approx(sum(window) / len(window), rel=1e-12)
            assert (row["loss_min"], row["loss_max"]) == (min(window), max(window))
            first = row["step"] + 1
    assert first == 9


def test_results_do_not_depend_on_engine_partitions_schedule_or_checkpointing(tiny: Gpipe) -> None:
    reference = tiny("train", "engine=single", "threads=1", "--json").json
    expected = weights(reference["run_dir"])
    for words in (
        ["partitions=1", "checkpoint=never"],
        ["partitions=2", "checkpoint=always"],
        ["partitions=3", "schedule=1f1b"],
        ["balance=manual", "balance.layers=[1,5,2]"],
        ["partitions=4", "devices=[cpu,cpu]", "schedule=interleaved"],
    ):
        other = tiny("train", "threads=1", *words, "--json").json
        assert other["loss"] == reference["loss"], words
        actual = weights(other["run_dir"])
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected), words


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tiny: Gpipe) -> None:
    first, again, other = (
        weights(tiny("train", f"seed={seed}", "--json").json["run_dir"])["0.weight"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_steps_override_epochs_and_end_with_an_evaluation(tiny: Gpipe) -> None:
    summary = tiny("train", "steps=5", "epochs=1", "--json").json
    assert (summary["steps"], summary["epochs"]) == (5, 2)
    assert [row["step"] for row in rows(summary["run_dir"]) if row["split"] == "eval"] == [4, 5]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("engine", ["single", "threads"])
def test_half_precision_trains(tiny: Gpipe, engine: str, precision: str) -> None:
    summary = tiny("train", f"engine={engine}", f"precision={precision}", "clip_grad_norm=1", "--json").json
    metrics = rows(summary["run_dir"])
    assert all(row["loss"] < 10 for row in metrics)
    assert all(row["grad_norm"] > 0 for row in metrics if row["split"] == "train")


def test_the_log_contains_partitions_and_layers_on_request(tiny: Gpipe) -> None:
    plain = Path(tiny("train", "steps=1", "--json").json["run_dir"])
    assert "Micro-batch" not in (plain / "train.log").read_text()
    words = ("steps=2", "log.partitions=true", "log.layers=true", "log.console=true")
    answer = tiny("train", *words, "--json")
    log = Path(answer.json["run_dir"], "train.log").read_text()
    for written in (log, answer.err):
        partition = r"Micro-batch 0 \(partition 1\): checkpoint_stop=2, using_checkpointing=True"
        assert re.search(rf"(INFO |^)step 1 \| train \| {partition}$", written, re.MULTILINE)
        for label in ("step 2 | train | forward", "step 1 | train | recompute", "step 2 | eval | forward"):
            line = rf"{re.escape(label)} \| micro-batch 0 \| partition 0 \| layer 0 \| Conv2d \| [\d.]+ ms$"
            assert re.search(rf"(DEBUG |^){line}", written, re.MULTILINE)
        assert "step 1 | train | backward | micro-batch 2 | partition 1 | layer " in written
        assert "step 1 | eval" not in written and "step 3" not in written


def test_engine_single_logs_its_layers_too(tiny: Gpipe) -> None:
    answer = tiny("train", "steps=1", "engine=single", "log.layers=true", "--json")
    log = Path(answer.json["run_dir"], "train.log").read_text()
    assert "step 1 | train | backward | micro-batch 0 | partition 0 | layer 0 | Conv2d | " in log
    assert "Micro-batch" not in log and "train | forward" not in answer.err


def test_a_run_that_saved_nothing_is_started_again_as_the_error_says(tiny: Gpipe, tiny_run: Path) -> None:
    """run_dir=run was told to resume=run, which was told to give another directory."""
    for snapshot in (tiny_run / "snapshots").iterdir():
        shutil.rmtree(snapshot)
    answer = tiny("train", "resume=run", "steps=1")
    assert answer.code == 4
    assert "resume=run: contains no snapshot; start the run again with run_dir=run resume=auto" in answer.err
    assert tiny("train", "run_dir=run", "resume=auto", "steps=1").code == 0


def test_a_directory_with_a_run_is_refused(tiny: Gpipe, tiny_run: Path) -> None:
    before = sorted(tiny_run.rglob("*"))
    answer = tiny("train", "steps=1", "run_dir=run")
    assert answer.code == 2
    assert "run_dir=run: the directory exists and is not empty; resume=run continues the run" in answer.err
    assert sorted(tiny_run.rglob("*")) == before


def test_a_sweep_names_its_directories_by_their_words_and_ends_in_a_table(
    tiny: Gpipe, tmp_path: Path
) -> None:
    answer = tiny("train", "-m", "steps=1", "partitions=1,2", "run_dir=sweep")
    assert answer.code == 0
    assert "2 jobs, 0 failed" in answer.out
    names = [
        path.name.rpartition("-")[0] for path in sorted((tmp_path / "sweep").iterdir()) if "-" in path.name
    ]
    assert names == ["partitions-1", "partitions-2"]
    assert not [path.name for path in tmp_path.iterdir() if path.name in ("outputs", "multirun")]


def test_a_sweep_continues_after_a_failure_and_reports_it(tiny: Gpipe) -> None:
    answer = tiny("train", "-m", "steps=2", "partitions=99,1", "--json")
    first, second = answer.json
    assert answer.code == first["exit_code"] == 2
    assert "the model has only 8 layers" in first["error"]
    assert second["exit_code"] == 0 and second["steps"] == 2


def test_an_error_in_a_layer_is_one_line_with_its_place_and_no_control_characters(tiny: Gpipe) -> None:
    answer = tiny("train", "model._target_=tiny_for_tests.broken", "partitions=2")
    assert answer.code == 1
    (line,) = [line for line in answer.err.splitlines() if line.startswith("gpipe: error")]
    assert "ZeroDivisionError: as [31mwritten" in line
    assert "partition 1" in line and "layer '2'" in line and "\x1b" not in answer.err


def test_a_loss_that_is_not_finite_ends_with_code_5(tiny: Gpipe) -> None:
    answer = tiny("train", "optimizer=sgd", "optimizer.lr=1e30")
    assert answer.code == 5
    assert "the loss is" in answer.err and "step " in answer.err


def test_labels_that_the_model_does_not_have_end_with_code_3(tiny: Gpipe) -> None:
    answer = tiny("train", "data.classes=7", "model.num_classes=3")
    assert answer.code == 3
    assert "out of range" in answer.err


def test_balance_time_measures_once_and_logs_it(tiny: Gpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_cache, "recheck_layers", lambda *_: Drift("layer '0'", 1.0))
    words = ("balance.measure=always", "balance.seconds=0", "steps=1", "threads=1")
    first, second = tiny("train", *words), tiny("train", *words, "--json")
    assert "layers measured in " in first.err
    assert (
        "confirmed: layer '0' took 1.00 x the cached time; balance.cache=false measures them again"
        in second.err
    )
    log = (Path(second.json["run_dir"]) / "train.log").read_text()
    assert "confirmed" in log and "INFO partition 0 on cpu: layers 0 to " in log and " ms" in log
    assert "layers measured in " in tiny("train", *words, "balance.cache=false").err
    # Without running anything, what was measured before is there too; asking for a balance measures.
    assert tiny("train", *words, "--dry-run").code == 0
    assert "confirmed" not in tiny("balance", "--by", "time", "balance.seconds=0").err


def test_every_next_command_works_as_it_is_printed(tiny: Gpipe, gpipe: Gpipe) -> None:
    lines = tiny("train", "run_dir=here").out.splitlines()
    printed = {name: value.strip() for name, _, value in (line.partition(" ") for line in lines)}
    assert printed["best_epoch"].startswith(("1 (step 4, loss ", "2 (step 8, loss "))
    assert Path(printed["report"]).is_file()
    for name in ("evaluate", "train_longer", "export"):
        answer = gpipe(*shlex.split(printed[name])[1:])
        assert answer.code == 0, (printed[name], answer.err)
    assert json.loads((Path("here") / "summary.json").read_text())["epochs"] == 4


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


def test_a_dry_run_shows_the_partitions_that_the_run_trains_with(
    tiny: Gpipe, gpipe: Gpipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It estimated the times from FLOPs, without a word, where the run measured them: [5, 5] instead of [7, 3]."""
    slow_start = [LayerTimes(9.0 if index == 0 else 1.0, 1.0) for index in range(8)]
    monkeypatch.setattr(profile_cache, "layer_times", lambda *_, **__: slow_start)
    words = ("epochs=14", "threads=1")
    dry = tiny("train", *words, "--dry-run", "--json")
    assert [row["layers"] for row in dry.json["partitions"]] == [2, 6]
    assert dry.err.startswith("balance [2, 6]: layers measured in ")
    assert not Path("runs").exists()
    trained = tiny("train", *words, "run_dir=run", "--json")
    assert trained.json["partitions"] and "balance [2, 6]: " in trained.err
    allow = "allow=[tiny_for_tests]"
    resumed = gpipe("train", "resume=run", "epochs=15", allow, "--dry-run", "--json")
    assert [row["layers"] for row in resumed.json["partitions"]] == [2, 6]
    short = tiny("train", "steps=1", "balance.cache=false", "--dry-run")
    assert "estimated from FLOPs, since the run is too short" in short.err


def test_a_dry_run_that_has_to_estimate_prints_that_the_run_may_differ(huge: Gpipe) -> None:
    answer = huge("train", "--dry-run", "epochs=200")
    assert answer.code == 0, answer.err
    would_take, balance = answer.err.splitlines()
    assert re.fullmatch(
        r"measuring the layers would take .*iB, and .*iB are free here: the partitions below are estimated, and may "
        r"differ from the partitions of the run",
        would_take,
    )
    assert "estimated from FLOPs, since this process has no values of the parameters" in balance


@pytest.mark.slow
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


def test_a_dry_run_without_estimates_still_shows_the_partitions(tiny: Gpipe, user_module: UserModule) -> None:
    user_module(
        "looking_for_tests",
        "from torch import nn\n\n\n"
        "class Looking(nn.Module):\n"
        "    def forward(self, input):\n"
        "        return input * 2 if input.sum().item() > 0 else input\n\n\n"
        "def build(num_classes: int) -> nn.Sequential:\n"
        "    return nn.Sequential(nn.Flatten(), Looking(), nn.Linear(192, num_classes))\n",
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


def test_an_engine_of_the_command_line_ignores_keys_of_a_recipe_aloud(gpipe: Gpipe) -> None:
    """It was refused for a key that the user had not given and could not remove."""
    words = ("train", "recipe=gpt_sonnets", "engine=single", "--dry-run")
    answer = gpipe(*words)
    assert (
        answer.code == 0
        and "checkpoint: set by the recipe, and without effect with engine=single\n" in answer.err
    )
    answer = gpipe(*words, "checkpoint=never")
    assert answer.code == 2 and "checkpoint: has no effect with engine=single; remove it" in answer.err
