"""Tab completion of a command line.

Commands, flags and the arguments of `ls` and `cp` are completed here. Hydra completes keys and options; its own keys
and the folders next to recipes/ are removed from its answer.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO

from gpipe_cli.arguments import flag_names
from gpipe_cli.commands.ls import PLURALS, TOPICS
from gpipe_cli.config.options import list_options, takes_recipes
from gpipe_cli.config.overrides import SCALE_KEY, SCALES, override_group
from gpipe_cli.config.schema import NO_EFFECT, SCHEMAS
from gpipe_cli.errors import ConfigError
from gpipe_cli.help import COMMANDS

Hydra = Callable[[str, list[str]], None]
"""Runs Hydra's own completion for a command with these words; it prints."""
TASKS = ("install", "uninstall", "query")
SHELLS = ("bash", "fish", "zsh")


def complete(words: list[str], hydra: Hydra) -> None:
    """Answer `gpipe -sc query=bash`, or pass `install=bash` to Hydra."""
    task, _, shell = (words or [""])[0].partition("=")
    if len(words) != 1 or task not in TASKS or shell not in SHELLS:
        given = " ".join(words)
        raise ConfigError(
            f"-sc {given}: choose one of: {', '.join(f'{name}=bash' for name in TASKS)}, or fish, or zsh"
        )
    if task == "query":
        sys.stdout.write(" ".join(_candidates(os.environ.get("COMP_LINE", ""), words, hydra)) + "\n")
    else:
        hydra("train", words)


def _candidates(line: str, words: list[str], hydra: Hydra) -> list[str]:
    """The possible completions of the last word of the line."""
    _program, _, typed = line.lstrip().partition(" ")
    command, space, rest = typed.lstrip().partition(" ")
    last = rest.rpartition(" ")[2]
    if not space:
        return _starting_with(command, (*COMMANDS, "--help", "--version"))
    if command not in COMMANDS:
        return []
    if last.startswith("-"):
        return _starting_with(last, flag_names(command, configured=COMMANDS[command].configured))
    if command == "ls":
        return _starting_with(last, sorted({*TOPICS, *PLURALS}))
    if last.startswith("recipe.") and COMMANDS[command].configured and takes_recipes(command):
        return _starting_with(last, (f"{SCALE_KEY}={scale}" for scale in SCALES))
    if command == "cp" and " " not in rest.lstrip():
        return _starting_with(
            last, (f"{topic}/{option.name}" for topic in TOPICS for option in list_options(topic))
        )
    return _of_hydra(command, rest.lstrip(), words, hydra) if COMMANDS[command].configured else []


def _of_hydra(command: str, rest: str, words: list[str], hydra: Hydra) -> list[str]:
    """Keys and options. Hydra gets the line without the command and with `recipe` as its group `recipes`."""
    words_for_hydra = [
        word.replace("recipe=", "recipes=", 1) for word in rest.split(" ") if not word.startswith("-")
    ]
    os.environ["COMP_LINE"] = " ".join(["gpipe", *words_for_hydra])
    os.environ["COMP_POINT"] = str(len(os.environ["COMP_LINE"]))
    with redirect_stdout(StringIO()) as answer:
        hydra(command, words)
    known = {field.name for field in fields(SCHEMAS[command])} | {"recipe"}
    known -= set(NO_EFFECT.get(command, ()))
    # Hydra adds no equals sign to a group that contains options and folders, as recipes does.
    candidates = (re.sub(r"^recipes(=|$)", "recipe=", word) for word in answer.getvalue().split())
    return [word for word in candidates if override_group(word) in known]


def _starting_with(typed: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(typed)]
