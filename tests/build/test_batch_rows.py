"""Short mini-batches and layers that reject a single sample: split otherwise, or refused with the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Gpipe, UserModule

NORMED = """
from torch import nn


def build(num_classes: int, pooled: bool = True) -> nn.Sequential:
    pool = nn.AdaptiveAvgPool2d(1) if pooled else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), pool, nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
    )
"""


@pytest.fixture
def normed(tiny: Gpipe, user_module: UserModule) -> Gpipe:
    user_module("normed_for_tests", NORMED)
    words = ("model._target_=normed_for_tests.build", "allow=[normed_for_tests]")

    def run(command: str, *more: str) -> Any:
        size = () if any(word.startswith("batch_size=") for word in more) else ("batch_size=8",)
        return tiny(command, *words, *size, *more)

    return run


def test_a_last_batch_of_six_in_four_chunks_becomes_three_micro_batches_of_two(normed: Gpipe) -> None:
    answer = normed("train", "data.length=30", "chunks=4", "epochs=1")
    assert answer.code == 0
    assert answer.err.splitlines()[0] == (
        "chunks=4: layer '2' (BatchNorm2d) needs 2 samples in training, so a mini-batch of 6 becomes 3 micro-batches, "
        "not 4"
    )


def test_a_batch_norm_of_several_positions_takes_one_sample_and_nothing_changes(normed: Gpipe) -> None:
    answer = normed("train", "data.length=33", "model.pooled=false", "epochs=1")
    assert answer.code == 0 and "needs 2 samples" not in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data.length=33"],
            "batch_size=8: the last mini-batch of 33 samples has 1, but layer '2' (BatchNorm2d) needs at least 2 in "
            "training; set data.drop_last=true, or another batch_size",
        ),
        (
            ["data.length=33", "batch_size=1"],
            "batch_size=1: a mini-batch has 1, but layer '2' (BatchNorm2d) needs at least 2 in training; give a larger "
            "batch_size",
        ),
        (
            ["data.length=35", "data_parallel=2", "engine=processes"],
            "batch_size=8: the last mini-batch of 35 samples leaves one of data_parallel=2 replicas 1 of 3, but layer "
            "'2' (BatchNorm2d) needs at least 2 in training; set data.drop_last=true, or another batch_size",
        ),
        (
            ["data.length=1"],
            "batch_size=8: the last mini-batch of 1 samples has 1, but layer '2' (BatchNorm2d) needs at least 2 in "
            "training; give more samples",
        ),
    ],
)
def test_what_cannot_be_split_otherwise_is_refused_before_training(
    normed: Gpipe, words: list[str], message: str
) -> None:
    answer = normed("train", *words)
    assert (answer.code, answer.err) == (2, f"gpipe: error: {message}\n")
    assert not Path("runs").exists()


def test_the_last_batch_does_not_matter_if_the_run_ends_before_it(normed: Gpipe) -> None:
    assert normed("train", "data.length=33", "steps=2", "--dry-run").code == 0


def test_layers_are_measured_with_as_many_samples_as_they_need(normed: Gpipe) -> None:
    answer = normed("balance", "--by", "time", "chunks=8", "data.length=33")
    assert answer.code == 0 and "a mini-batch of 8 becomes 4 micro-batches" in answer.err
