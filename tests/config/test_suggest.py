from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.config.suggest import did_you_mean, or_list

KEYS = ["chunks", "eval_chunks", "seed", "optimizer.lr", "log.every"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [("chunk", "chunks"), ("sed", "seed"), ("optimizer.lrr", "optimizer.lr"), ("lr", "optimizer.lr")],
)
def test_a_near_name_is_suggested(word: str, meant: str) -> None:
    assert did_you_mean(word, KEYS) == f"did you mean '{meant}'?"


def test_where_nothing_is_near_nothing_is_claimed_and_the_list_is_shown() -> None:
    assert did_you_mean("zzzz", KEYS) == ""
    assert or_list("zzzz", ["b", "a"]) == "choose one of: a, b"
    assert or_list("chunk", KEYS) == "did you mean 'chunks'?"


@given(st.text(max_size=20))
def test_any_word_has_an_answer(word: str) -> None:
    assert or_list(word, KEYS)
