from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpipe_cli.cli import main
from gpipe_cli.config.keys import check_words, known_keys
from gpipe_cli.config.schema import GROUPS, SCHEMAS, WITH_MODEL
from gpipe_cli.config.words import Request
from gpipe_cli.errors import ConfigError

EVERY_KEY = tuple(dict.fromkeys(key for command in SCHEMAS for key in known_keys(command)))


def of_command(command: str) -> set[str]:
    """The keys that the command takes, and the groups that they belong to."""
    return {*known_keys(command), *(key.partition(".")[0] for key in known_keys(command))}


@pytest.mark.parametrize("command", SCHEMAS)
def test_a_command_refuses_every_key_that_it_does_not_have(command: str) -> None:
    """`gpipe eval optimizer.lr=1` suggested optimizer.lr, and `gpipe train plan.verify_budget=1` ignored its key."""
    accepted = []
    for key in EVERY_KEY:
        if key in known_keys(command):
            continue
        try:
            check_words(Request(command, (f"{key}=1",)))
        except ConfigError as error:
            message = str(error)
            assert re.search(rf"\b{key.partition('.')[0]}\b", message), message
            suggested = re.findall(r"did you mean '(.+?)'", message)
            assert set(suggested) <= of_command(command) - {key}, message
        else:
            accepted.append(key)
    assert accepted == []


@pytest.mark.parametrize("command", SCHEMAS)
def test_a_command_takes_every_key_that_it_has(command: str) -> None:
    keys = [key for key in known_keys(command) if key not in (*GROUPS, "recipe")]
    check_words(Request(command, tuple(f"{key}=auto" for key in keys)))


@pytest.mark.parametrize(
    ("command", "word"),
    [
        *((command, "frobnicate=1") for command in SCHEMAS),
        *(("train", word) for word in ("chunkz=2", "config.x=1", "hydraa.x=1")),
    ],
)
def test_an_unknown_key_ends_in_one_line(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, word]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"gpipe: error: unknown key '{word.partition('=')[0].removesuffix('.x')}")


def test_a_file_cannot_choose_an_option_where_there_are_only_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("plan: none\n")
    assert main(["plan", "config=my.yaml"]) == 2
    assert "my.yaml: plan: holds several keys; set one of them" in capsys.readouterr().err
    Path("my.yaml").write_text("plan: {budget: 5}\n")
    assert main(["plan", "config=my.yaml", "--cfg", "job", "--package", "plan.budget"]) == 0
    assert capsys.readouterr().out == "5\n"


@pytest.mark.parametrize("command", [command for command in SCHEMAS if command not in WITH_MODEL])
def test_a_command_without_a_model_prints_its_configuration(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--cfg", "job"]) == 0
    shown = re.findall(r"^(\w+):", capsys.readouterr().out, flags=re.MULTILINE)
    assert sorted([*shown, "config"]) == sorted(known_keys(command))
