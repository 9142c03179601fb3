from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.config.quoting import quoted


def read(word: str) -> Any:
    (override,) = OverridesParser.create().parse_overrides([quoted(word)])
    return list(override.sweep_string_iterator()) if override.is_sweep_override() else override.value()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("run_dir=日本", "日本"),
        ("run_dir=runs/Füße-1", "runs/Füße-1"),
        ("data.path=/mnt/R&D/set #1", "/mnt/R&D/set #1"),
        ("run_dir=a=b", "a=b"),
        ("run_dir=it's", "it's"),
        (r"run_dir=é\,è", "é,è"),
        ("run_dir=${oc.env:HOME}/日本", "${oc.env:HOME}/日本"),
        ("model.layers=[日, 本,3]", ["日", "本", 3]),
        ("model.names={a:é,b:2}", {"a": "é", "b": 2}),
    ],
)
def test_a_value_hydra_has_no_characters_for_is_read_as_it_stands(word: str, value: object) -> None:
    """`run_dir=日本` used to be refused with the advice to quote it for the shell, which did not help."""
    assert read(word) == value


def test_a_sweep_over_such_values_is_a_sweep() -> None:
    assert read("run_dir=日,本") == ["'日'", "'本'"]


@pytest.mark.parametrize(
    "word",
    [
        "chunks=8",
        "~model.width",
        "balance.layers=[4,6]",
        "lr=choice(0.1,0.2)",
        "steps=range(1,9,step=2)",
        "run_dir='日本'",
        'run_dir="a, b"',
        "data.path=${oc.env:HOME}/x",
        r"run_dir=a\,b",
        "run_dir=",
        "model.kwargs={a: 1, b: {c: [x, y]}}",
    ],
)
def test_what_hydra_reads_anyway_is_left_alone(word: str) -> None:
    assert quoted(word) == word


@given(st.text(st.characters(exclude_characters="[]{}(),\"'\\$\n\r", exclude_categories=["Cs"]), min_size=1))
def test_any_text_of_one_piece_is_read_as_itself(text: str) -> None:
    word = quoted(f"run_dir={text}")
    if word != f"run_dir={text}":
        (override,) = OverridesParser.create().parse_overrides([word])
        assert override.value() == text.strip(" \t")
