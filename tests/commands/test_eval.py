from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.run import saved_run
from gpipe_cli.run import trained as trained_model

Gpipe = Callable[..., Any]
ALLOW = "allow=[tiny_for_tests]"


@pytest.fixture
def trained(tiny: Gpipe) -> dict[str, Any]:
    summary: dict[str, Any] = tiny("train", "threads=1", "--json").json
    return summary


def test_evaluating_a_run_gives_the_results_of_its_last_evaluation(
    tiny: Gpipe, trained: dict[str, Any]
) -> None:
    summary = tiny("eval", f"run={trained['run_dir']}", ALLOW, "--json").json
    assert summary["loss"] == trained["loss"]
    assert summary["top1"] == trained["top1"]
    assert summary["samples"] == 16


@pytest.mark.parametrize(
    "words",
    [["partitions=4"], ["engine=single"], ["balance=manual", "balance.layers=[1,7]"], ["eval_chunks=1"]],
)
def test_a_run_can_be_evaluated_with_other_settings_than_it_was_trained_with(
    tiny: Gpipe, trained: dict[str, Any], words: list[str]
) -> None:
    summary = tiny("eval", f"run={trained['run_dir']}", ALLOW, *words, "--json").json
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
    summary = tiny("eval", f"run={trained['run_dir']}", *words).json
    assert summary["top1"] == trained["top1"] and summary["loss"] == pytest.approx(trained["loss"], rel=1e-6)
    assert tiny("export", f"run={trained['run_dir']}", "out=all.safetensors").code == 0
    words += ["data=synthetic", "data.shape=[3,8,8]", "data.length=64", "batch_size=20", "chunks=3"]
    words += ["weights=all.safetensors", "model._target_=tiny_for_tests.build"]
    assert tiny("eval", *words).json["loss"] == summary["loss"]
    wrong = tiny("eval", *words, "+model.width=5")
    assert wrong.code == 2 and "weights=all.safetensors: made for another model (9 with another" in wrong.err


def test_the_training_samples_can_be_evaluated_too(tiny: Gpipe, trained: dict[str, Any]) -> None:
    assert tiny("eval", f"run={trained['run_dir']}", ALLOW, "split=train", "--json").json["samples"] == 64


def test_keys_of_the_runs_own_data_can_be_changed(tiny: Gpipe, trained: dict[str, Any]) -> None:
    """The default data has no key `length`; the run's has."""
    summary = tiny("eval", f"run={trained['run_dir']}", ALLOW, "data.length=128", "--json").json
    assert summary["samples"] == 32


def test_a_saved_config_cannot_allow_its_own_packages(tiny: Gpipe, trained: dict[str, Any]) -> None:
    answer = tiny("eval", f"run={trained['run_dir']}")
    assert answer.code == 2
    assert "allow=[tiny_for_tests]: may only be given on the command line" in answer.err


def test_a_hostile_run_directory_executes_nothing(
    tiny: Gpipe, trained: dict[str, Any], tmp_path: Path
) -> None:
    config = Path(trained["run_dir"]) / "config.yaml"
    text = config.read_text()
    for hostile in (
        text.replace("tiny_for_tests.build", "os.mkdir\n  path: canary"),
        "model: !!python/object/apply:os.mkdir [canary]\n",
        "- a\n- list\n",
        "\x00",
        "a: [1\n",
    ):
        config.write_text(hostile)
        answer = tiny("eval", f"run={trained['run_dir']}", ALLOW)
        assert answer.code in (2, 4)
        assert answer.err.startswith("gpipe: error: ") and answer.err.count("\n") == 1
        assert not (tmp_path / "canary").exists()


def test_damaged_or_misfitting_weights_end_with_code_4(tiny: Gpipe, trained: dict[str, Any]) -> None:
    (path,) = Path(trained["run_dir"]).glob("snapshots/*/model.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    answer = tiny("eval", f"run={trained['run_dir']}", ALLOW)
    assert (answer.code, "damaged" in answer.err) == (4, True)
    path.write_bytes(whole)
    answer = tiny("eval", f"run={trained['run_dir']}", ALLOW, "+model.width=5")
    assert (answer.code, "does not fit the model" in answer.err) == (4, True)
    shutil.rmtree(path.parent)
    assert tiny("eval", f"run={trained['run_dir']}", ALLOW).code == 4


def test_evaluation_changes_no_weights_on_disk(tiny: Gpipe, trained: dict[str, Any]) -> None:
    (path,) = Path(trained["run_dir"]).glob("snapshots/*/model.safetensors")
    before = path.read_bytes()
    tiny("eval", f"run={trained['run_dir']}", ALLOW)
    assert path.read_bytes() == before


def test_an_evaluation_with_another_engine_ignores_the_keys_of_the_training_engine(tiny: Gpipe) -> None:
    """`partitions` and `schedule` come from the run's config.yaml, not from the command line of the evaluation."""
    run = tiny("train", "steps=1", "partitions=2", "schedule=1f1b", "checkpoint=always", "--json").json
    summary = tiny("eval", f"run={run['run_dir']}", ALLOW, "engine=single", "--json").json
    assert summary["top1"] == run["top1"]
    answer = tiny("eval", f"run={run['run_dir']}", ALLOW, "engine=single", "schedule=1f1b")
    assert (answer.code, "schedule: has no effect with engine=single" in answer.err) == (2, True)


def test_a_dry_evaluation_shows_the_partitions_only(tiny: Gpipe, trained: dict[str, Any]) -> None:
    summary = tiny("eval", f"run={trained['run_dir']}", ALLOW, "--dry-run", "--json").json
    assert [row["layers"] for row in summary["partitions"]] == [4, 4] and "loss" not in summary
    assert "partition" in tiny("eval", f"run={trained['run_dir']}", ALLOW, "--dry-run").out


def test_an_unresolvable_reference_in_a_saved_config_is_reported_with_its_key(
    tiny: Gpipe, trained: dict[str, Any]
) -> None:
    config = Path(trained["run_dir"]) / "config.yaml"
    config.write_text(config.read_text().replace("chunks: 3\n", "chunks: ${nowhere}\n"))
    answer = tiny("eval", f"run={trained['run_dir']}", ALLOW)
    assert (answer.code, answer.err) == (2, "gpipe: error: chunks: interpolation key 'nowhere' not found\n")
