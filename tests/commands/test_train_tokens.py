"""Training on tokens of a tokenizer: resumed in the middle of an epoch to the bit, and bad input in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.run_files import rows as metrics_rows
from tests.support.tokenizers import CHATML, save_tokenizer

Run = Callable[..., Any]
SMALL = (
    "model=gpt",
    "model.width=8",
    "model.depth=2",
    "model.heads=2",
    "batch_size=5",
    "chunks=3",
    "log.every=1",
)


@pytest.fixture
def chats(gpipe: Run, tmp_path: Path) -> tuple[str, ...]:
    """The words for a data set of chats, whose answers have different lengths."""
    save_tokenizer(tmp_path / "tokenizer", eos_token="<|im_end|>", chat_template=CHATML)
    with (tmp_path / "chats.jsonl").open("w") as file:
        for length in range(24):
            question = {"role": "user", "content": "shall I compare thee?"}
            answer = {"role": "assistant", "content": "summer " * length}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return (
        "data=jsonl",
        "data.path=chats.jsonl",
        "data.field=messages",
        "data.tokenizer=tokenizer",
        "data.context=24",
    )


def rows(run: str) -> list[dict[str, Any]]:
    lines = metrics_rows(run)
    return [
        {name: row[name] for name in ("step", "split", "loss", "bits_per_token", "perplexity")}
        for row in lines
    ]


@pytest.mark.slow
def test_a_run_resumed_in_the_middle_of_an_epoch_continues_to_the_bit(
    gpipe: Run, chats: tuple[str, ...]
) -> None:
    words = ("train", *SMALL, *chats, "steps=8", "snapshot.every=5", "snapshot.keep=9")
    assert gpipe(*words, "run_dir=run", "log.predictions=true").code == 0
    sample = json.loads(Path("run/sample.json").read_text())
    assert sample["prompt"] and 0 < sample["tokens"] <= 120 and sample["seed"] == 0
    expected, weights = rows("run"), load_file("run/snapshots/step-00000008/model.safetensors")
    assert expected[-1]["perplexity"] == pytest.approx(2 ** expected[-1]["bits_per_token"])
    shutil.rmtree("run/snapshots/step-00000008")
    assert gpipe("train", "resume=run/snapshots/step-00000005").code == 0
    assert rows("run") == expected
    again = load_file("run/snapshots/step-00000008/model.safetensors")
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.slow
def test_engines_and_divisions_agree_on_the_mean_over_answers(gpipe: Run, chats: tuple[str, ...]) -> None:
    losses = {}
    for name, words in {
        "threads": ("chunks=3",),
        "single": ("engine=single", "chunks=3"),
        "offload": ("engine=offload", "chunks=3"),
        "whole": ("engine=single", "chunks=1"),
    }.items():
        assert (
            gpipe("train", *SMALL[:-2], "log.every=1", *chats, "steps=3", *words, f"run_dir={name}").code == 0
        )
        losses[name] = [row["loss"] for row in rows(name)]
    assert losses["threads"] == losses["single"] == losses["offload"]
    assert losses["whole"] == pytest.approx(losses["single"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("data.path=*.nothing",), 3, "data.path=*.nothing: no file matches"),
        (("data.tokenizer=nowhere",), 2, "data.tokenizer=nowhere: no such file or directory"),
        (("data.tokenizer=tokenizer/tokenizer.json",), 3, "line 1: messages need a chat template"),
        (("data.field=text",), 3, "line 1: has no field 'text'; set data.field to one of: messages"),
        (("data.context=999",), 3, "tokens are too few to train on and to hold out windows of 999"),
        (("data.cache=chats.jsonl/tokens",), 6, "data.cache=chats.jsonl/tokens: cannot be written"),
    ],
)
def test_bad_input_is_one_line_before_training(
    gpipe: Run, chats: tuple[str, ...], words: tuple[str, ...], code: int, message: str
) -> None:
    given = {word.partition("=")[0] for word in words}
    answer = gpipe("train", *SMALL, *(word for word in chats if word.partition("=")[0] not in given), *words)
    assert answer.code == code and message in answer.err and len(answer.err.splitlines()) == 1, answer.err
    assert not Path("runs").exists()
