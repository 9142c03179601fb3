"""Every recipe says how it is run, what comes out and how long it takes; the slow tests hold it to that."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from gpipe_cli.config.locate import Option, options

each_recipe = pytest.mark.parametrize("recipe", options("recipes"), ids=lambda recipe: recipe.name)
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda found, bound: found >= bound,
    "<=": lambda found, bound: found <= bound,
}


def expectation(recipe: Option) -> tuple[str, str, float]:
    """The measure, which side of the bound it is on, and the bound."""
    found = re.fullmatch(r"(\w+)(>=|<=)([\d.]+)", recipe.facts["expected"])
    assert found is not None, recipe.facts
    return found[1], found[2], float(found[3])


@each_recipe
def test_the_first_lines_tell_command_result_and_time(recipe: Option) -> None:
    assert recipe.description.startswith(f"gpipe train recipe={recipe.name}: ")
    expectation(recipe)
    assert float(recipe.facts["minutes"]) > 0
    assert "\n# Expected: " in recipe.path.read_text(encoding="utf-8")


@each_recipe
def test_a_recipe_passes_every_check(recipe: Option, gpipe: Callable[..., Any]) -> None:
    answer = gpipe("train", f"recipe={recipe.name}", "balance=uniform", "--cfg", "job")
    assert answer.code == 0, answer.err


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_recipe
def test_a_recipe_keeps_its_promise(recipe: Option, gpipe: Callable[..., Any]) -> None:
    answer = gpipe("train", f"recipe={recipe.name}", "--json")
    assert answer.code == 0, answer.err
    measure, comparison, bound = expectation(recipe)
    assert COMPARISONS[comparison](answer.json[measure], bound), answer.json
