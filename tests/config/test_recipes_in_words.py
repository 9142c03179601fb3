"""A recipe and its scale become one choice of Hydra's group, and come back as they were written."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.config.recipes import SCALES, as_written, to_group
from gpipe_cli.errors import ConfigError

names = st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True)


def test_a_scale_is_a_folder_of_the_group() -> None:
    assert to_group(["recipe=x"]) == ["recipes=x"]
    assert to_group(["recipe=x", "recipe.scale=full"]) == ["recipes=x"]
    assert to_group(["recipe.scale=small", "chunks=8", "recipe=x"]) == ["chunks=8", "recipes=small/x"]


def test_a_sweep_has_each_recipe_in_each_scale() -> None:
    words = ["recipe=x,y", "recipe.scale=full,small"]
    assert to_group(words) == ["recipes=x,small/x,y,small/y"]


@given(names, st.sampled_from(SCALES))
def test_what_was_written_comes_back(name: str, scale: str) -> None:
    written = [f"recipe={name}", "chunks=8"]
    given = [*written, f"recipe.scale={scale}"]
    back = list(as_written(to_group(given)))
    assert sorted(back) == sorted(given if scale == "small" else written)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipe.scale=small"], "recipe.scale=small: is a recipe's, and none is given; gpipe train recipe="),
        (["recipe=x", "recipe.scale=smal"], "recipe.scale=smal: did you mean 'small'?"),
        (["recipe=x", "recipe.scale="], "recipe.scale=: one of: full, small"),
        (
            ["recipe=x", "recipe.scale=small", "recipe.scale=full"],
            "recipe.scale: given 2 times (small, full)",
        ),
    ],
)
def test_a_scale_that_cannot_be_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        to_group(words)
