"""Tab completion of a command line: prints candidates, and never an error.

Keys and options come from the same table as the help. Nothing is composed, so that a Tab is answered at once. Where
there are no candidates, the shell offers its files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpipe_cli.arguments import flags_of
from gpipe_cli.commands.ls import PLURALS, TOPICS
from gpipe_cli.config.checks import CHOICES
from gpipe_cli.config.keys import key_table, list_options
from gpipe_cli.config.schema import SCHEMAS, SWEPT
from gpipe_cli.config.words import SCALE_KEY, SCALES
from gpipe_cli.errors import ConfigError
from gpipe_cli.help import COMMANDS

HYDRA = {
    "hydra/launcher": ("basic", "joblib", "submitit_local", "submitit_slurm"),
    "hydra/sweeper": ("basic", "optuna"),
}
"""The groups of Hydra for sweeps, with the options that gpipe-cli[sweeps] installs."""
TASKS = ("install", "uninstall", "query")
REMOVE = {"bash": "complete -r gpipe", "zsh": "compdef -d gpipe", "fish": "complete -c gpipe -e"}


def complete(words: list[str]) -> None:
    """Answer `gpipe -sc query=bash`, or print the script of `gpipe -sc install=bash`."""
    task, _, shell = " ".join(words).partition("=")
    if task not in TASKS or shell not in REMOVE:
        tasks = ", ".join(f"{name}=bash" for name in TASKS)
        raise ConfigError(f"-sc {' '.join(words)}: choose one of: {tasks}, or fish, or zsh")
    if task == "install":
        sys.stdout.write(Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8"))
    elif task == "uninstall":
        sys.stdout.write(f"{REMOVE[shell]}\n")
    else:
        try:
            found = _candidates(os.environ.get("COMP_LINE", ""))
        except Exception:  # noqa: BLE001 - a shell would print the message into the line that is being typed
            found = []
        sys.stdout.write("".join(f"{candidate}\n" for candidate in found))


def _candidates(line: str) -> list[str]:
    """The possible completions of the last word of the line."""
    _program, *words = line.lstrip().split(" ")
    *words, last = [*filter(None, words[:-1]), *words[-1:]] or [""]
    command, *earlier = words or [""]
    if not words:
        return _starting_with(last, (*COMMANDS, "--help", "--version"))
    if last.startswith("-") and command in COMMANDS:
        return _starting_with(last, (name for flag in flags_of(command) for name in flag.names))
    if command == "ls" or (command in ("cp", "launch-script") and not earlier):
        return _starting_with(last, _first_words(command))
    if command not in SCHEMAS or (command in ("cp", "report", "runs") and not last):
        return []  # a file
    return _keys_and_values(command, earlier, last)


def _first_words(command: str) -> Sequence[str]:
    """What may stand directly after a command that takes words without a key."""
    if command == "cp":
        return [
            "run/",
            *(f"{topic}/{option.name}" for topic in (*TOPICS, "recipe") for option in list_options(topic)),
        ]
    return sorted({*TOPICS, *PLURALS}) if command == "ls" else CHOICES["kind"]


def _keys_and_values(command: str, earlier: Sequence[str], last: str) -> list[str]:
    """Keys of the command and of the options that the earlier words choose; after `key=`, its values."""
    rows = key_table(command, earlier)
    key, equals, _ = last.partition("=")
    values: Iterable[str] = {**CHOICES, **HYDRA, SCALE_KEY: SCALES}.get(key, ())
    if not equals:
        return _starting_with(last, (f"{name}=" for name in (*rows, *(HYDRA if command in SWEPT else ()))))
    if key in rows and rows[key].type == "group":
        values = (option.name for option in list_options(key))
    elif key in rows and rows[key].default in ("true", "false"):
        values = ("true", "false")
    return _starting_with(last, (f"{key}={name}" for name in values))


def _starting_with(typed: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(typed)]
