from __future__ import annotations

import re
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.config.words import SCALES, group_to_recipe, quote_override, recipe_to_group
from gpipe_cli.errors import ConfigError

names = st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True)


def test_a_scale_is_a_folder_of_the_group() -> None:
    assert recipe_to_group(["recipe=x"]) == ["recipes=x"]
    assert recipe_to_group(["recipe=x", "recipe.scale=full"]) == ["recipes=x"]
    assert recipe_to_group(["recipe.scale=small", "chunks=8", "recipe=x"]) == ["chunks=8", "recipes=small/x"]


def test_a_sweep_has_each_recipe_in_each_scale() -> None:
    words = ["recipe=x,y", "recipe.scale=full,small"]
    assert recipe_to_group(words) == ["recipes=x,small/x,y,small/y"]


@given(names, st.sampled_from(SCALES))
def test_what_was_written_comes_back(name: str, scale: str) -> None:
    written = [f"recipe={name}", "chunks=8"]
    given = [*written, f"recipe.scale={scale}"]
    back = list(group_to_recipe(recipe_to_group(given)))
    assert sorted(back) == sorted(given if scale == "small" else written)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["recipe.scale=small"],
            "recipe.scale=small: needs a recipe, and none is given; gpipe train recipe=",
        ),
        (["recipe=x", "recipe.scale=smal"], "recipe.scale=smal: did you mean 'small'?"),
        (["recipe=x", "recipe.scale="], "recipe.scale=: choose one of: full, small"),
        (
            ["recipe=x", "recipe.scale=small", "recipe.scale=full"],
            "recipe.scale: given 2 times (small, full)",
        ),
    ],
)
def test_a_scale_that_cannot_be_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        recipe_to_group(words)


def read(word: str) -> Any:
    (override,) = OverridesParser.create().parse_overrides([quote_override(word)])
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
        ("model.names={a: 'é, è', b: \"*.bias\"}", {"a": "é, è", "b": "*.bias"}),
        ("optimizer.groups=[{match: '{x}', lr_scale: 2}]", [{"match": "{x}", "lr_scale": 2}]),
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
    assert quote_override(word) == word


@given(st.text(st.characters(exclude_characters="[]{}(),\"'\\$\n\r", exclude_categories=["Cs"]), min_size=1))
def test_any_text_of_one_piece_is_read_as_itself(text: str) -> None:
    word = quote_override(f"run_dir={text}")
    if word != f"run_dir={text}":
        (override,) = OverridesParser.create().parse_overrides([word])
        assert override.value() == text.strip(" \t")
