from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.pipeline.layer_loop import LayerLoop
from tests.support.command_line import Gpipe
from tests.support.run_files import weights

BROKEN = (
    "allow=[tests]",
    "model._target_=tests.support.broken_models.has_no_deterministic_kernel",
    "batch_size=16",
)
DATA = ("data=synthetic", "data.length=32", "devices=[cpu,cpu]", "log.every=1")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether layers ran with deterministic algorithms."""
    seen: set[bool] = set()
    run = LayerLoop.run

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.add(torch.are_deterministic_algorithms_enabled())
        return run(*args, **kwargs)

    monkeypatch.setattr(LayerLoop, "run", recorded)
    return seen


def test_training_and_evaluation_use_deterministic_algorithms_and_change_no_bit_on_the_cpu(
    tiny: Gpipe, modes: set[bool]
) -> None:
    default = tiny("train", "epochs=1", "--json").json
    assert modes == {False}
    modes.clear()
    answer = tiny("train", "epochs=1", "deterministic=true", "--json").json
    assert modes == {True}
    assert "deterministic: true" in (Path(answer["run_dir"]) / "config.yaml").read_text()
    expected, actual = weights(default["run_dir"]), weights(answer["run_dir"])
    assert all(torch.equal(expected[name], actual[name]) for name in expected | actual)
    modes.clear()
    tiny("eval", f"run={answer['run_dir']}", "allow=[tiny_for_tests]", "--json").json  # noqa: B018
    assert modes == {True}, "a run's settings are those of its evaluation"
    assert not torch.are_deterministic_algorithms_enabled()


def test_resuming_with_another_value_is_allowed_and_reported(tiny: Gpipe, modes: set[bool]) -> None:
    run = tiny("train", "epochs=1", "--json").json["run_dir"]
    modes.clear()
    words = (f"resume={run}", "epochs=2", "deterministic=true", "allow=[tiny_for_tests]")
    answer = tiny("train", *words, "--json")
    assert "changed: deterministic: false -> true" in answer.err and modes == {True}


@pytest.mark.parametrize("command", ["balance", "profile"])
def test_measurements_use_the_same_algorithms_as_the_training(
    tiny: Gpipe, modes: set[bool], command: str
) -> None:
    words = ["balance=time"] if command == "balance" else ["seconds=0"]
    assert tiny(command, *words, "deterministic=true", "--json").code == 0
    assert modes == {True}


@pytest.mark.parametrize(
    "words", [("train", "steps=1"), ("balance", "balance=time"), ("profile", "seconds=0")], ids=lambda x: x[0]
)
def test_an_operator_without_a_deterministic_kernel_is_an_error_of_one_line(
    gpipe: Gpipe, words: tuple[str, ...]
) -> None:
    answer = gpipe(*words, *BROKEN, *(DATA if words[0] == "train" else DATA[:3]), "deterministic=true")
    assert answer.code == 2
    assert "deterministic=true: torch has no deterministic kernel for the operator put_" in answer.err
    errors = [line for line in answer.err.splitlines() if line.startswith("gpipe: error: ")]
    assert answer.err.splitlines()[-1:] == errors and "layer '2' (Scatter)" in errors[0]
