from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from gpipe_cli.arguments import parse
from gpipe_cli.errors import ConfigError
from gpipe_cli.values import quoted
from tests.support.command_line import Gpipe


def test_the_command_in_the_summary_is_the_typed_one(tiny: Gpipe, tmp_path: Path) -> None:
    recipe = tmp_path / "own" / "recipes" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\nsteps: 1\n", encoding="utf-8")
    words = ("recipe=mine", "--config-dir", "own", "--dry-run", "--json")
    line = tiny("train", *words).json["command"]
    assert line.startswith("gpipe train model._target_=tiny_for_tests.build 'allow=[tiny_for_tests]' ")
    assert line.endswith(" recipe=mine --config-dir own")


@pytest.mark.parametrize("engine", ["single", "threads"])
def test_more_chunks_than_samples_are_reported_as_fewer_micro_batches(tiny: Gpipe, engine: str) -> None:
    answer = tiny("train", "steps=1", "batch_size=4", "chunks=9", f"engine={engine}")
    assert answer.code == 0
    assert "chunks=9 is more than batch_size=4: each mini-batch is split into 4 micro-batches" in answer.err


def test_a_run_that_fails_says_why_in_its_log(tiny: Gpipe, tmp_path: Path) -> None:
    tiny("train", "model._target_=tiny_for_tests.broken")
    (log,) = tmp_path.glob("runs/train/broken/*/train.log")
    assert "ERROR the run ends here" in log.read_text() and "ZeroDivisionError" in log.read_text()


@pytest.mark.parametrize("name", ["a\x07b", "a\x1b[31mb", "a\nb", "a\u202eb", "a\udc80b"])
def test_a_name_that_a_printed_command_cannot_repeat_is_refused(name: str) -> None:
    """`gpipe train run_dir=$'a\\x07b'` trained, and none of the commands that it printed found the run."""
    with pytest.raises(ConfigError, match=r"run_dir: contains the character '\\"):
        parse([f"run_dir={name}"])


def test_no_command_writes_anything_under_such_a_name(tiny: Gpipe, tmp_path: Path) -> None:
    Path("my.yaml").write_text(json.dumps({"run_dir": "a\nb"}))
    before = {path.name for path in tmp_path.iterdir()}
    for line in (
        "train run_dir=a\x07b",
        "train config=my.yaml",
        "launch-script slurm nodes=2 gpus_per_node=1 time_limit=1h run_dir='a\x07b'",
        "runs a\x07b",
        "report a\x07b",
        "export run=a\x07b",
        "cp model/mlp a\x07b.yaml",
    ):
        answer = tiny(*line.split())
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        key = "run_dir: " if line.startswith(("train", "launch-script")) else ""
        assert f"{key}contains the character '\\" in answer.err
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["a  b", "a b ", "a,b", "日本　語", "R&D", "it's"])
def test_the_command_that_a_run_prints_names_its_directory(tiny: Gpipe, name: str) -> None:
    """Two spaces in a name became one in the printed command."""
    answer = tiny("train", "steps=1", f"run_dir={quoted(name)}")
    lines = dict(line.split(maxsplit=1) for line in answer.out.splitlines())
    assert tiny(*shlex.split(lines["export"])[1:], "out=weights.safetensors").code == 0


def test_epochs_that_steps_of_a_file_override_are_reported_or_refused(tiny: Gpipe, gpipe: Gpipe) -> None:
    """`gpipe train recipe=x epochs=5` ignored the epochs without a word if the recipe had steps."""
    Path("own/recipes").mkdir(parents=True)
    Path("own/recipes/mine.yaml").write_text("# @package _global_\nsteps: 1\n", encoding="utf-8")
    says = "epochs has no effect, because a file sets steps=1, which overrides it; add steps=null"
    trained = tiny("train", "recipe=mine", "--config-dir", "own", "epochs=2", "run_dir=run")
    assert trained.code == 0 and says in trained.err.splitlines()
    resumed = gpipe("train", "resume=run", "epochs=2", "allow=[tiny_for_tests]")
    assert (resumed.code, resumed.err) == (2, f"gpipe: error: {says}\n")
    again = gpipe(
        "train", "resume=run", "epochs=2", "steps=null", "allow=[tiny_for_tests]", "--dry-run", "--json"
    )
    assert again.json["steps"] == 8
    Path("my.yaml").write_text("steps: 1\n", encoding="utf-8")
    assert tiny("train", "config=my.yaml", "epochs=3", "--dry-run", "--json").json["steps"] == 12


def test_a_broken_pipe_inside_a_layer_is_an_error(tiny: Gpipe) -> None:
    """`gpipe ls | head` ends with 0 on a broken pipe; a training run that died of one must not."""
    answer = tiny("train", "model._target_=tiny_for_tests.piped", "steps=1")
    assert answer.code == 1
    assert "BrokenPipeError: [Errno 32] Broken pipe (in partition 1, layer '2'" in answer.err
