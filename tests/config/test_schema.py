from __future__ import annotations

import dataclasses

import pytest

from gpipe_cli.config.keys import config_keys
from gpipe_cli.config.schema import NO_EFFECT, SCHEMAS


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_key_has_a_sentence(command: str) -> None:
    for field in config_keys(command).values():
        assert field.meaning.endswith("."), field.key


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_field_of_the_schema_is_found(command: str) -> None:
    top = {key.partition(".")[0] for key in config_keys(command)} - {"config", "recipe"}
    fields = {field.name for field in dataclasses.fields(SCHEMAS[command])}
    assert top == fields - set(NO_EFFECT.get(command, ()))


def test_defaults_are_shown_as_they_are_written_on_the_command_line() -> None:
    shown = {key: (field.type, field.default) for key, field in config_keys("train").items()}
    assert shown["seed"] == ("int", "0")
    assert shown["steps"] == ("int", "null")
    assert shown["log.layers"] == ("bool", "false")
    assert shown["model"] == ("group", "")
