from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpipe_cli.config import keys
from gpipe_cli.config.keys import (
    Option,
    chosen_options,
    conf_dir,
    config_keys,
    groups_of,
    list_options,
    resources_dir,
)
from gpipe_cli.config.schema import GROUPS, NO_EFFECT, SCHEMAS

TEXT = """# @package _global_
# What it is.
# facts: layers=3 input=3x8x8
defaults:
  - other
_target_: somewhere.build
size: 32  # side of the images; null: 8
betas: [0.9, 0.999] # two moments
empty:
nested: # has no value of its own
  inner: null  # of nested
  deeper:
    still: 1
last: 2
"""


@pytest.fixture
def option(tmp_path: Path) -> Option:
    (tmp_path / "mine.yaml").write_text(TEXT, encoding="utf-8")
    return Option("mine", tmp_path / "mine.yaml")


def test_an_option_is_described_by_its_first_line_for_people(option: Option) -> None:
    assert option.description == "What it is."


def test_an_options_keys_have_default_and_meaning(option: Option) -> None:
    assert option.keys == {
        "size": ("32", "side of the images; null: 8"),
        "betas": ("[0.9, 0.999]", "two moments"),
        "empty": ("", ""),
        "nested.inner": ("null", "of nested"),
        "nested.deeper.still": ("1", ""),
        "last": ("2", ""),
    }


def test_an_options_facts_are_those_it_states(option: Option, tmp_path: Path) -> None:
    assert option.facts == {"layers": "3", "input": "3x8x8"}
    (tmp_path / "mine.yaml").write_text("a: 1\n", encoding="utf-8")
    assert (option.facts, option.description) == ({}, "")


def test_conf_and_recipes_lie_side_by_side() -> None:
    assert conf_dir() == resources_dir() / "conf"
    assert (resources_dir() / "recipes").is_dir()


@pytest.mark.parametrize("group", [*GROUPS, "recipes"])
def test_every_group_has_options_in_the_order_of_their_names(group: str) -> None:
    names = [option.name for option in list_options(group)]
    assert names and names == sorted(names)


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_group_of_a_command_has_a_default(command: str) -> None:
    assert set(chosen_options(command)) == groups_of(command) - set(NO_EFFECT.get(command, ()))


def test_recipes_are_for_training() -> None:
    assert [command for command in SCHEMAS if "recipe" in config_keys(command)] == ["train", "launch-script"]


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_key_has_a_sentence(command: str) -> None:
    for field in config_keys(command).values():
        assert field.meaning.endswith("."), field.key


def test_every_meaning_belongs_to_a_key() -> None:
    text = Path(keys.__file__).with_suffix(".ini").read_text(encoding="utf-8")
    for key, command in re.findall(r"^([a-z_.]+)(?: of ([a-z-]+))?: ", text, flags=re.MULTILINE):
        assert any(key in config_keys(each) for each in ([command] if command else SCHEMAS)), (key, command)


def test_defaults_are_shown_as_they_are_written_on_the_command_line() -> None:
    shown = {key: (field.type, field.default) for key, field in config_keys("train").items()}
    assert shown["seed"] == ("int", "0")
    assert shown["steps"] == ("int", "null")
    assert shown["log.layers"] == ("bool", "false")
    assert shown["model"] == ("group", "")


def test_who_looks_for_pretrained_weights_is_sent_to_the_key_for_them() -> None:
    """`model.pretrained=true` was answered with "did you mean 'model.tied'?"."""
    assert keys.hint_for_unknown("model.pretrained", "train").startswith("give model.weights=<file>")
