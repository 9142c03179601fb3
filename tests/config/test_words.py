from __future__ import annotations

import re
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.config.words import named_packages, quote_override, sets_hydra, to_hydra
from gpipe_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "hydra"),
    [
        ("recipe=x", "recipes=x"),
        ("recipe=x recipe.scale=full", "recipes=x"),
        ("recipe.scale=small chunks=8 recipe=x", "chunks=8 recipes=small/x"),
        ("chunks=8 +seed=3 ~steps", "chunks=8 +seed=3 ~steps"),
        ("optimizer=sgd optimizer.lr=1", "optimizer=sgd optimizer.lr=1"),
        ("+optimizer.foreach=true", "++optimizer.foreach=true"),
        (
            "model._target_=mine.build model.width=3 ~model.depth",
            "model=custom ++model._target_=mine.build ++model.width=3",
        ),
        ("model=mypkg.nets:build", "model=custom ++model._target_=mypkg.nets.build"),
        (
            "model=mypkg:Net.tiny model.width=3",
            "model=custom ++model._target_=mypkg.Net.tiny ++model.width=3",
        ),
        ("loss=./losses.py:build", "loss=custom ++loss._target_=losses.build"),
        ("data=pkg/sets.py:build", "data=custom ++data._target_=pkg.sets.build"),
        ("schedule.name=mine.order", "schedule.name=mine.order"),
    ],
)
def test_hydra_gets_options_and_keys_that_it_takes(words: str, hydra: str) -> None:
    assert to_hydra(words.split()) == hydra.split()


def test_a_continued_run_may_have_keys_that_the_default_option_does_not_list() -> None:
    words = ["model.width=3", "~model.depth", "chunks=2", "model=mlp"]
    assert to_hydra(words, open_groups=("model",)) == ["++model.width=3", *words[1:]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "recipe.scale=small",
            "recipe.scale=small: needs a recipe, and none is given; gpipe train recipe=",
        ),
        ("recipe=x recipe.scale=smal", "recipe.scale=smal: did you mean 'small'?"),
        ("recipe=x recipe.scale=", "recipe.scale=: choose one of: full, small"),
        (
            "optimizer=sgd optimizer._target_=torch.optim.Adam",
            "optimizer=sgd and optimizer._target_ exclude each other; give one of them",
        ),
        ("model=/abs/nets.py:build", "/abs/nets.py:build: give a file below the current folder"),
        ("model=../nets.py:build", "../nets.py:build: give a file below the current folder"),
        ("model=my-nets.py:build", "my-nets.py:build: give a file below the current folder"),
    ],
)
def test_words_that_cannot_be_together_are_refused(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        to_hydra(words.split())


def test_the_command_line_allows_the_packages_of_the_code_that_it_names() -> None:
    words = [
        "model=mypkg.nets:build",
        "loss=./losses.py:build",
        "data=digits",
        "seed=a:b",
        "optimizer=torch.optim:SGD",
    ]
    assert named_packages(words) == ["mypkg", "losses"]


@pytest.mark.parametrize(
    ("word", "sets"),
    [
        ("hydra.sweep.dir=x", True),
        ("hydra/launcher=joblib", True),
        ("+hydra.job.env_set.A=b", True),
        ("~hydra.job", True),
        ("+model@hydra.job=resnet18", True),
        ("+model@_global_.hydra.job=resnet18", True),
        ("hydration=1", False),
        ("model=hydra", False),
        ("run_dir=hydra.x", False),
    ],
)
def test_words_that_configure_hydra_are_told_from_others(word: str, sets: bool) -> None:
    assert sets_hydra(word) is sets


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
        ("run_dir=${oc.env:HOME}/日本", "${oc.env:HOME}/日本"),
    ],
)
def test_a_value_hydra_has_no_characters_for_is_read_as_it_stands(word: str, value: object) -> None:
    """`run_dir=日本` used to be refused with the advice to quote it for the shell, which did not help."""
    assert read(word) == value


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
        "model.layers=['日','本']",
        "run_dir='日','本'",
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
