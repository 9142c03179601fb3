from __future__ import annotations

from typing import Any

import pytest
from gpipe_cli.config.file_words import file_words
from gpipe_cli.config.saved_config import is_saved, reduce_saved

from gpipe_cli.config.compose import Request, compose_plain
from gpipe_cli.config.keys import list_options

CASES = {
    "": {"model": "resnet18"},
    "model=gpt data.context=16 optimizer=sgd optimizer.lr=1": {
        "model": "gpt",
        "data": {"context": 16},
        "optimizer": {"option": "sgd", "lr": 1},
    },
    "model=resnet34 data=synthetic loss=mse run_dir=x resume=auto": {
        "model": "resnet34",
        "data": "synthetic",
        "loss": "mse",
    },
    "model._target_=mine.build model.width=3 allow=[mine]": {
        "model": {"_target_": "mine.build", "width": 3},
    },
    "schedule=1f1b plan=auto plan.budget=5 steps=3 log.every=1 +model.extra=[{a:1}]": {
        "model": {"option": "resnet18", "+extra": [{"a": 1}]},
        "schedule": "1f1b",
        "plan": {"option": "auto", "budget": 5.0},
        "steps": 3,
        "log": {"every": 1},
    },
    "schedule.name=mine.order 'logger.project=${oc.env:HOME},b' logger=wandb": {
        "model": "resnet18",
        "schedule": {"name": "mine.order"},
        "logger": {"option": "wandb", "project": "${oc.env:HOME},b"},
    },
}


def composed(words: tuple[str, ...], command: str = "train") -> dict[str, Any]:
    return compose_plain(Request(command, words))[0]


def check_round_trip(words: tuple[str, ...]) -> dict[str, Any]:
    saved = composed(words)
    assert is_saved(saved)
    reduced, left_out = reduce_saved(saved, "train")
    assert left_out == []
    launch = {"run_dir": None, "resume": None, "allow": []}
    assert {**composed(file_words(reduced, "train")), **launch} == {**saved, **launch}
    return reduced


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[] if number % 3 == 1 else pytest.mark.slow)
        for number, line in enumerate(CASES)
    ],
)
def test_a_saved_configuration_is_reduced_to_what_was_chosen_and_composes_to_the_same(line: str) -> None:
    words = tuple(word.strip("'") if "'" in word else word for word in line.split())
    words = tuple(word.replace("${oc.env:HOME},b", "'${oc.env:HOME},b'") for word in words)
    assert check_round_trip(words) == CASES[line]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [option.name for option in list_options("recipes")])
def test_the_configuration_of_every_recipe_is_reduced_and_composes_to_the_same(recipe: str) -> None:
    check_round_trip((f"recipes={recipe}",))


@pytest.mark.parametrize(
    ("command", "expected", "missing"),
    [
        ("plan", {"model": "resnet18", "chunks": 2, "optimizer": "sgd"}, {"steps", "epochs", "precision"}),
        ("eval", {"model": "resnet18", "chunks": 2, "precision": "bf16"}, {"steps", "epochs", "optimizer"}),
        ("generate", {"model": "resnet18", "precision": "bf16"}, {"steps", "chunks", "seed"}),
    ],
)
def test_another_command_takes_the_keys_that_mean_the_same_to_it(
    command: str, expected: dict[str, Any], missing: set[str]
) -> None:
    saved = composed(("chunks=2", "steps=3", "precision=bf16", "optimizer=sgd", "seed=4"))
    reduced, left_out = reduce_saved(saved, command)
    assert reduced == expected
    assert missing <= set(left_out)


def test_a_key_that_no_command_has_is_kept_so_that_it_is_reported() -> None:
    saved = {**composed(()), "novelty": 1}
    assert reduce_saved(saved, "train")[0]["novelty"] == 1


@pytest.mark.parametrize(
    "plain",
    [{}, {"model": "resnet18"}, {"model": {"_target_": "x"}}, {"allow": [], "model": "resnet18"}],
)
def test_a_file_of_keys_is_not_taken_for_a_saved_configuration(plain: dict[str, Any]) -> None:
    assert not is_saved(plain)


def test_an_older_run_without_a_key_keeps_what_its_absence_meant() -> None:
    saved = composed(("optimizer=adamw",))
    assert saved["optimizer"].pop("no_decay")
    reduced, _ = reduce_saved(saved, "train")
    assert composed(file_words(reduced, "train"))["optimizer"]["no_decay"] == []
