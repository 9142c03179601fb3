from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Gpipe = Callable[..., Any]


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


def test_names_with_control_characters_never_reach_the_terminal(tiny: Gpipe, tmp_path: Path) -> None:
    answer = tiny("train", "steps=1", "run_dir='a\x1b[31mb'")
    assert answer.code == 0 and (tmp_path / "a\x1b[31mb").is_dir()
    assert "\x1b" not in answer.out + answer.err


def test_a_broken_pipe_inside_a_layer_is_an_error(tiny: Gpipe) -> None:
    """`gpipe ls | head` ends with 0 on a broken pipe; a training run that died of one must not."""
    answer = tiny("train", "model._target_=tiny_for_tests.piped", "steps=1")
    assert answer.code == 1
    assert "BrokenPipeError: [Errno 32] Broken pipe (in partition 1, layer '2'" in answer.err
