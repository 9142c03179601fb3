from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.inference import trained as trained_model
from gpipe_cli.runs import saved as saved_run
from tests.support.command_line import Gpipe
from tests.support.run_files import rows as metrics_rows

ALLOW = "allow=[tiny_for_tests]"


@pytest.fixture
def evaluate(tiny: Gpipe, tiny_run: Path) -> Gpipe:
    return lambda *words: tiny("eval", "run=run", ALLOW, *words)


@pytest.fixture
def trained(tiny_run: Path) -> dict[str, Any]:
    """That of the run."""
    content: dict[str, Any] = json.loads((tiny_run / "summary.json").read_text())
    return content


def test_evaluating_a_run_gives_the_results_of_its_last_evaluation(
    evaluate: Gpipe, trained: dict[str, Any]
) -> None:
    summary = evaluate("--json").json
    assert summary["loss"] == trained["loss"]
    assert summary["top1"] == trained["top1"]
    assert summary["samples"] == 16


@pytest.mark.parametrize(
    "words",
    [["partitions=4"], ["engine=single"], ["balance=manual", "balance.layers=[1,7]"], ["eval_chunks=1"]],
)
def test_a_run_can_be_evaluated_with_other_settings_than_it_was_trained_with(
    evaluate: Gpipe, trained: dict[str, Any], words: list[str]
) -> None:
    summary = evaluate(*words, "--json").json
    assert summary["top1"] == trained["top1"]
    assert summary["loss"] == pytest.approx(trained["loss"], rel=1e-6)


def test_a_model_on_disk_is_never_whole_in_memory(
    tiny: Gpipe, trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        trained_model, "load_into_model", lambda *_: pytest.fail("the whole model was loaded")
    )
    monkeypatch.setattr(saved_run, "read_weights", lambda *_: pytest.fail("a whole file was read"))
    words = [ALLOW, "engine=offload", "engine.to=disk", "engine.slices=3", "--json"]
    answer = tiny("eval", "run=run", *words)
    assert answer.code == 0, answer.err
    summary = answer.json
    assert summary["top1"] == trained["top1"] and summary["loss"] == pytest.approx(trained["loss"], rel=1e-6)
    assert tiny("export", "run=run", "out=all.safetensors").code == 0
    words += ["data=synthetic", "data.shape=[3,8,8]", "data.length=64", "batch_size=20", "chunks=3"]
    words += ["weights=all.safetensors", "model._target_=tiny_for_tests.build"]
    assert tiny("eval", *words).json["loss"] == summary["loss"]
    wrong = tiny("eval", *words, "+model.width=5")
    assert wrong.code == 2 and "weights=all.safetensors: made for another model (9 with another" in wrong.err


def test_the_training_samples_can_be_evaluated_too(evaluate: Gpipe) -> None:
    assert evaluate("split=train", "--json").json["samples"] == 64


def test_weights_to_start_training_from_are_refused(evaluate: Gpipe) -> None:
    answer = evaluate("model.weights=other.pth")
    assert answer.code == 2 and "model.weights: is where training starts" in answer.err


def test_keys_of_the_runs_own_data_can_be_changed(evaluate: Gpipe) -> None:
    """The default data has no key `length`; the run's has."""
    summary = evaluate("data.length=128", "--json").json
    assert summary["samples"] == 32


def test_a_saved_config_cannot_allow_its_own_packages(tiny: Gpipe, tiny_run: Path) -> None:
    answer = tiny("eval", "run=run")
    assert answer.code == 2
    assert answer.err.startswith(
        "gpipe: error: add 'allow=[tiny_for_tests]' to the command line, or set GPIPE_ALLOW="
    )


def test_damaged_or_misfitting_weights_end_with_code_4(evaluate: Gpipe, tiny_run: Path) -> None:
    (path,) = tiny_run.glob("snapshots/*/model.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    answer = evaluate()
    assert (answer.code, "damaged" in answer.err) == (4, True)
    path.write_bytes(whole)
    answer = evaluate("+model.width=5")
    assert (answer.code, "does not fit the model" in answer.err) == (4, True)
    shutil.rmtree(path.parent)
    assert evaluate().code == 4


def test_evaluation_changes_no_weights_on_disk(evaluate: Gpipe, tiny_run: Path) -> None:
    (path,) = tiny_run.glob("snapshots/*/model.safetensors")
    before = path.read_bytes()
    evaluate()
    assert path.read_bytes() == before


def test_an_evaluation_with_another_engine_ignores_the_keys_of_the_training_engine(tiny: Gpipe) -> None:
    """`partitions` and `schedule` come from the run's config.yaml, not from the command line of the evaluation."""
    run = tiny("train", "steps=1", "partitions=2", "schedule=1f1b", "checkpoint=always", "--json").json
    summary = tiny("eval", f"run={run['run_dir']}", ALLOW, "engine=single", "--json").json
    assert summary["top1"] == run["top1"]
    answer = tiny("eval", f"run={run['run_dir']}", ALLOW, "engine=single", "schedule=1f1b")
    assert (answer.code, "schedule: has no effect with engine=single" in answer.err) == (2, True)


def test_a_dry_evaluation_shows_the_partitions_only(evaluate: Gpipe) -> None:
    summary = evaluate("--dry-run", "--json").json
    assert [row["layers"] for row in summary["partitions"]] == [4, 4] and "loss" not in summary
    assert "partition" in evaluate("--dry-run").out


def test_an_unresolvable_reference_in_a_saved_config_is_reported_with_its_key(
    evaluate: Gpipe, tiny_run: Path
) -> None:
    config = tiny_run / "config.yaml"
    config.write_text(config.read_text().replace("chunks: 3\n", "chunks: ${nowhere}\n"))
    answer = evaluate()
    assert (answer.code, answer.err) == (2, "gpipe: error: chunks: interpolation key 'nowhere' not found\n")


@pytest.mark.slow
def test_the_best_snapshot_is_evaluated_unless_another_is_asked_for(tiny: Gpipe, tmp_path: Path) -> None:
    """A run that got worse at its end was evaluated and exported at its end, though it had printed a better epoch."""
    words = ["epochs=4", "snapshot.monitor=loss", "snapshot.keep=9", "optimizer.lr=3", "lr_schedule=constant"]
    last = tiny("train", *words, "run_dir=run", "--json").json
    rows = metrics_rows(tmp_path / "run")
    best = min((row for row in rows if row["split"] == "eval"), key=lambda row: float(row["loss"]))
    assert best["loss"] < last["loss"], "the learning rate is so high that training diverges"
    default = tiny("eval", "run=run", ALLOW, "--json")
    assert default.err == f"best: eval loss {best['loss']:.4g} at step {best['step']} of 16\n"
    assert default.json["loss"] == best["loss"]
    newest = tiny("eval", "run=run", "which=last", ALLOW, "--json")
    assert newest.err.startswith("last: step 16 (best: eval loss ") and newest.json["loss"] == last["loss"]
    named = tiny("eval", "snapshot=run/snapshots/step-00000016", ALLOW, "--json")
    assert named.err == "snapshot: step 16\n" and named.json["loss"] == last["loss"]
    exported = tiny("export", "run=run", "--json")
    assert exported.err == default.err and exported.json["snapshot"].endswith(f"step-{best['step']:08d}")
    assert tiny("export", "run=run", "which=last", "out=last", "--json").json["snapshot"].endswith("16")

    (tmp_path / f"run/snapshots/step-{best['step']:08d}/model.safetensors").write_bytes(b"damaged")
    for command in (("eval", "run=run", ALLOW), ("export", "run=run", "out=other")):
        answer = tiny(*command)
        assert answer.code == 4 and "its best snapshot (eval loss" in answer.err
        assert answer.err.endswith("give which=last to use the last one\n")
    assert tiny("eval", "run=run", "at=last", ALLOW).code == 0, "the former name of the key"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run=run", "which=bset"], 2, "which=bset: did you mean 'best'?"),
        (
            ["weights=w.safetensors", "which=best"],
            2,
            "which=best: chooses among the snapshots of run=...; with weights",
        ),
        (
            ["run=run", "which=best"],
            4,
            "which=best: run=run has no best snapshot, because it has not been evaluated yet or",
        ),
    ],
)
def test_a_choice_of_snapshot_that_makes_no_sense_is_refused(
    tiny: Gpipe, tiny_run: Path, words: list[str], code: int, message: str
) -> None:
    answer = tiny("eval", *words, ALLOW)
    assert answer.code == code and message in answer.err
