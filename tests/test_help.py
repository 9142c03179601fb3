from __future__ import annotations

import re

import pytest

from gpipe_cli.arguments import flag_names
from gpipe_cli.config.keys import default_options, list_options
from gpipe_cli.config.schema import GROUPS, SCHEMAS, config_keys
from gpipe_cli.help import COMMANDS, FLAGS, WIDTH, command_help, overview


def examples(text: str) -> list[str]:
    (section,) = re.findall(r"^Examples:\n((?:  .*\n)+)", text, flags=re.MULTILINE)
    return str(section).splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_usage_and_four_examples(command: str) -> None:
    text = command_help(command)
    assert f"Usage: gpipe {command}" in text
    assert len(examples(text)) == 4 and all(line.strip().startswith("gpipe ") for line in examples(text))


def test_the_overview_names_every_command_and_four_examples() -> None:
    text = overview()
    assert "Usage: gpipe <command>" in text and len(examples(text)) == 4
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_key_is_shown_with_its_meaning(command: str) -> None:
    text = " ".join(command_help(command).split())
    for field in config_keys(command):
        assert field.key.partition(".")[0] in text and field.meaning in text


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_option_of_every_group_is_shown_and_the_default_marked(command: str) -> None:
    text = " ".join(command_help(command).split())
    chosen = default_options(command)
    for group in (group for group in GROUPS if group in chosen):
        names = (
            f"{option.name}*" if option.name == chosen[group].name else option.name
            for option in list_options(group)
        )
        assert f"Options: {', '.join(names)}." in text
        for key, (default, _) in chosen[group].keys.items():
            assert f"{group}.{key} = {default}".strip() in text


def test_recipes_are_shown_where_they_can_be_used() -> None:
    """It called all of them tested, and six are for machines that nobody of us has."""
    recipes = list_options("recipes")
    here = ", ".join(option.name for option in recipes if "minutes" in option.facts)
    elsewhere = ", ".join(option.name for option in recipes if "devices" in option.facts)
    shown = " ".join(command_help("train").split())
    assert (
        f"A complete run. Tested on two CPU cores: {here}. Benchmarks of torchgpipe for eight GPUs" in shown
    )
    assert f"not run by us: {elsewhere}." in shown
    assert "recipe.scale  full, or small" in command_help("train")
    assert "A complete run" not in command_help("eval") and "recipe.scale" not in command_help("eval")


def test_every_flag_in_the_help_exists_and_every_long_flag_is_in_the_help() -> None:
    documented = {word for flag in FLAGS for word in re.findall(r"--?[a-z-]+", flag, flags=re.IGNORECASE)} - {
        "-sc"
    }
    assert documented <= set(flag_names(configured=True))
    meanings = " ".join([*FLAGS, *FLAGS.values()])
    for flag in flag_names(configured=True):
        if flag.startswith("--") and flag not in ("--help", "--run"):
            assert flag in meanings


@pytest.mark.parametrize("text", [overview(), *map(command_help, COMMANDS)])
def test_no_line_is_wider_than_its_limit(text: str) -> None:
    assert max(map(len, text.splitlines())) <= WIDTH + 2
