"""Every recipe says how it is run, what comes out and how long it takes; the slow tests hold it to that."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.published_lines import Line, published_lines
from gpipe_cli import huggingface
from gpipe_cli.config.compose import compose
from gpipe_cli.config.keys import Option, list_options
from gpipe_cli.config.words import Request
from tests.support.command_line import Gpipe

FULL = list_options("recipes")
SMALL = list_options("recipes/small")
BY_NAME = {recipe.name: recipe for recipe in FULL}
LINES = [
    pytest.param(recipe.name, line, id=f"{recipe.name} {line.name}")
    for recipe in SMALL
    for line in published_lines(recipe.name)
]
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda value, bound: value >= bound,
    "<=": lambda value, bound: value <= bound,
}


NEEDED = {"model.path": "tiny-llama", "model.weights": "resnet10t.safetensors"}
"""What the tests give for the keys that a recipe needs; `make_needed` makes it."""


def words(recipe: Option) -> list[str]:
    """What runs it on two cores."""
    needs = [recipe.facts["needs"]] if "needs" in recipe.facts else []
    scale = ["recipe.scale=small"] if recipe in SMALL else []
    given = [recipe.facts["with"]] if "with" in recipe.facts else []
    return [f"recipe={recipe.name}", *scale, *(f"{key}={NEEDED[key]}" for key in needs), *given]


def make_needed(recipe: Option) -> None:
    """Make the files that the words name, in the current folder."""
    match recipe.facts.get("needs"):
        case "model.path":
            script = Path(__file__).parents[1] / "examples" / "tiny_llama" / "make_tiny_llama.py"
            runpy.run_path(str(script))["make_directory"](Path("tiny-llama"))
        case "model.weights":
            timm = huggingface.import_package("timm")
            torch.manual_seed(0)
            save_file(timm.create_model("resnet10t").state_dict(), NEEDED["model.weights"])


# Those that are for larger machines are run here in their small scale.
each_that_runs_here = pytest.mark.parametrize(
    "recipe",
    [*(recipe for recipe in FULL if "minutes" in recipe.facts), *SMALL],
    ids=lambda recipe: "-".join(words(recipe)),
)


def expectation(recipe: Option) -> tuple[str, str, float]:
    """The measure, which side of the bound it is on, and the bound."""
    match = re.fullmatch(r"(\w+)(>=|<=)([\d.]+)", recipe.facts["expected"])
    assert match is not None, recipe.facts
    return match[1], match[2], float(match[3])


@each_that_runs_here
def test_the_first_lines_tell_command_result_and_time(recipe: Option) -> None:
    assert recipe.description.startswith(f"gpipe train {' '.join(words(recipe))}: ")
    expectation(recipe)
    assert float(recipe.facts["minutes"]) > 0
    assert re.search(r"\n# Expected: .*(minute|second)s? .*core", recipe.path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("small", SMALL, ids=lambda recipe: recipe.name)
def test_a_recipe_for_a_larger_machine_tells_its_result_its_devices_and_its_small_scale(
    small: Option,
) -> None:
    full = BY_NAME[small.name]
    assert full.description.startswith(f"gpipe train recipe={full.name}: ")
    # `gpipe ls recipes` showed torchgpipe's figures as those to expect, in a list of tested runs.
    assert re.search(r"on 8 GPUs; not run by us, the figures are torchgpipe 0\.0\.\d's\.$", full.description)
    assert full.facts["expected"].startswith("torchgpipe:") and int(full.facts["devices"]) == 8
    text = full.path.read_text(encoding="utf-8")
    assert "\n# Expected: " in text and f"\n# gpipe train {' '.join(words(small))}: " in text


@each_that_runs_here
def test_a_recipe_passes_every_check(recipe: Option) -> None:
    compose(Request("train", tuple(words(recipe))))


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "line"), LINES)
def test_a_published_line_is_reached_by_its_words(recipe: str, line: Line, gpipe: Gpipe) -> None:
    answer = gpipe("train", f"recipe={recipe}", *line.words, "--cfg", "job")
    assert answer.code == 0, answer.err
    for word in line.words:
        path, _, value = word.partition("=")
        key = path.rpartition(".")[2]
        assert re.search(rf"^ *{key}: {re.escape(value)}$", answer.out, flags=re.MULTILINE), word


def test_a_line_without_words_is_the_recipe_itself() -> None:
    for recipe in SMALL:
        assert [line.name for line in published_lines(recipe.name) if not line.words], recipe.name


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_that_runs_here
def test_a_recipe_keeps_its_promise(recipe: Option, gpipe: Gpipe) -> None:
    make_needed(recipe)
    answer = gpipe("train", *words(recipe), "--json")
    assert answer.code == 0, answer.err
    measure, comparison, bound = expectation(recipe)
    assert COMPARISONS[comparison](answer.json[measure], bound), answer.json
