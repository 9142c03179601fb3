from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import (
    ConfigError,
    GpipeError,
    NumericError,
    RunError,
    StepTimeout,
    Stopped,
    did_you_mean,
    exit_code,
    or_list,
)

KEYS = ["chunks", "eval_chunks", "seed", "optimizer.lr", "log.every"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GpipeError("x"), 1),
        (ConfigError("x"), 2),
        (RunError("x"), 4),
        (NumericError("x"), 5),
        (StepTimeout("x"), 7),
        (Stopped("x"), 75),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("x"), 1),
        (OSError(errno.ENOSPC, "x"), 6),
        (PermissionError(errno.EACCES, "x"), 6),
        (FileNotFoundError(errno.ENOENT, "x"), 1),
        (SystemExit(0), 1),
        (SystemExit(3), 1),
        (GeneratorExit(), 1),
    ],
)
def test_every_error_has_its_exit_code_and_a_layers_exit_is_no_success(
    error: BaseException, code: int
) -> None:
    assert exit_code(error) == code


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
