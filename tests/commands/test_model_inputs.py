"""Commands on data whose samples are dicts of different lengths, with a model that takes them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli import __file__ as package
from tests.support.command_line import Gpipe

EXAMPLE = Path(package).parents[1] / "examples" / "your_own_data" / "sentences.py"
WORDS = (
    "data._target_=sentences.build",
    "model._target_=sentences.tagger",
    "allow=[sentences]",
    "loss=token_cross_entropy",
    "data.count=30",
    "batch_size=8",
    "chunks=3",
    "threads=1",
    "--json",
)


@pytest.fixture
def sentences(gpipe: Gpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """gpipe with the words above, in a folder with the example."""
    shutil.copy(EXAMPLE, tmp_path)

    def run(command: str, *words: str) -> Any:
        answer = gpipe(command, *WORDS, *words)
        assert answer.code == 0, answer.err
        return answer.json

    yield run
    sys.modules.pop("sentences", None)


ENGINES = {
    "threads": ("partitions=3", "schedule=1f1b"),
    "offload": ("engine=offload", "engine.slices=3"),
}
MORE_ENGINES = {
    "threads with parameters on disk": ("engine.offload=disk", "partitions=2"),
    "workers that load": ("data.workers=1",),
}


@pytest.mark.parametrize("engines", [ENGINES, pytest.param(MORE_ENGINES, marks=pytest.mark.slow)])
def test_engines_of_one_process_give_the_same_bits(
    sentences: Callable[..., Any], engines: dict[str, tuple[str, ...]]
) -> None:
    """Five steps are more than an epoch, whose last batch is short, and two evaluations."""
    expected = sentences("train", "engine=single", "steps=5")
    for engine, words in engines.items():
        ours = sentences("train", *words, "steps=5")
        assert (ours["loss"], ours["token_accuracy"]) == (expected["loss"], expected["token_accuracy"]), (
            engine
        )


@pytest.mark.slow
def test_processes_give_the_same_bits(sentences: Callable[..., Any], gpipe: Gpipe) -> None:
    expected = sentences("train", "engine=single", "steps=6", "run_dir=one")
    for schedule in ("gpipe", "zero_bubble"):
        ours = sentences("train", "engine=processes", "partitions=3", f"schedule={schedule}", "steps=6")
        assert ours["loss"] == expected["loss"], schedule
    replicas = sentences("train", "engine=processes", "partitions=2", "data_parallel=2", "steps=6")
    assert replicas["loss"] == pytest.approx(expected["loss"], rel=0.05), "dropout differs"
    for engine in ("single", "processes", "offload"):
        words = ("run=one", "allow=[sentences]", f"engine={engine}", "threads=1", "--json")
        assert gpipe("eval", *words).json["loss"] == expected["loss"], engine


@pytest.mark.slow
def test_layers_are_balanced_profiled_and_planned(sentences: Callable[..., Any]) -> None:
    for method in ("size", "time"):
        assert sum(sentences("balance", f"balance={method}", "partitions=3")["balance"]) == 6
    assert sentences("plan", "devices=2", "device=v100")["best"]["balance"]
    for engine in ("threads", "offload", "processes", "single"):
        assert len(sentences("train", f"engine={engine}", "--dry-run")["layers"]) == 6


def test_memory_is_estimated_for_the_longest_sentences(sentences: Callable[..., Any]) -> None:
    """The first sentences are short: a limit that suits them only must be refused before a long batch comes."""
    first = sentences("profile", "partitions=2")["layers"][0]
    assert first["output_shape"][0][1] == 16


def test_a_model_of_one_tensor_is_refused_before_training(sentences: Callable[..., Any], gpipe: Any) -> None:
    others = [word for word in WORDS if not word.startswith("model._target_=")]
    answer = gpipe("train", *others, "model=gpt")
    assert answer.code == 2
    assert "layer 'embedding' (Embedding) does not take a dict of input_ids 2x" in answer.err
    assert "choose a model that takes such arguments, or data whose inputs are one tensor" in answer.err
