"""GPT attends only to earlier tokens and refuses settings that do not fit, by key."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.gpt import build


def test_a_token_changes_only_later_outputs() -> None:
    model = build(16, 2, 4, num_classes=9, input_shape=(8,)).eval()
    tokens = torch.randint(8, (1, 8))
    other = tokens.clone()
    other[0, 5] = 8
    differs = (model(tokens) != model(other)).any(-1)[0]
    assert differs.tolist() == [False] * 5 + [True] * 3


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied, untied = build(16, 1, 2), build(16, 1, 2, tied=False)
    assert tied[-1].scores.weight is tied[0].tokens.weight
    names = [name for name, _ in untied.named_parameters()]
    assert [name for name, _ in tied.named_parameters()] == names[:-1] and names[-1] == "head.scores.weight"


def test_before_training_it_is_as_good_as_guessing() -> None:
    torch.manual_seed(0)
    tokens, target = torch.randint(256, (2, 4, 32))
    scores = build()(tokens).detach()
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())
    assert float(loss) == pytest.approx(math.log(256), rel=0.05)


def test_it_accepts_shorter_sequences_than_it_was_built_for() -> None:
    assert build(16, 1, 2)(torch.randint(256, (2, 7))).shape == (2, 7, 256)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"width": 10, "heads": 4}, "model.heads=4: must divide model.width=10"),
        ({"depth": 0}, "model.depth=0: must be a whole number of at least 1"),
        ({"dropout": 2.0}, "model.dropout=2.0: must be from 0 to 1"),
        ({"context": 64}, "model.context=64: samples have 32 tokens; set data.context=64"),
        ({"vocabulary": 9}, "model.vocabulary=9: must be at least 256, the number of tokens in the data"),
        ({"input_shape": (3, 8, 8)}, "gpt expects sequences of tokens, but the data has shape [3, 8, 8]"),
    ],
)
def test_settings_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(**keys)


def test_a_vocabulary_may_be_larger_than_the_data_needs() -> None:
    assert build(16, 1, 2, vocabulary=300)(torch.randint(256, (1, 32))).shape == (1, 32, 300)
