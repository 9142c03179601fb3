"""Tab completion of a command line: prints candidates, and never an error.

Commands, flags, paths and the words of commands without a configuration are completed here. Hydra completes keys and
options; its own keys and the folders next to recipes/ are removed from its answer.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import fields
from io import StringIO
from pathlib import Path

from gpipe_cli.arguments import flag_names
from gpipe_cli.commands.ls import PLURALS, TOPICS
from gpipe_cli.config.options import list_options, takes_recipes
from gpipe_cli.config.overrides import JOBS_KEY, SCALE_KEY, SCALES, override_group
from gpipe_cli.config.schema import NO_EFFECT, SCHEMAS
from gpipe_cli.errors import ConfigError
from gpipe_cli.help import COMMANDS

Hydra = Callable[[str, list[str]], None]
"""Runs Hydra's own completion for a command with these words; it prints."""
LAUNCH_SCRIPT, KINDS = "launch-script", ("slurm", "torchrun")
TASKS = ("install", "uninstall", "query")
SHELLS = ("bash", "fish", "zsh")
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin")
PATH_KEYS: dict[str, tuple[str, ...] | None] = {
    "config": (".yaml", ".yml"),
    "data.path": None,
    "data.root": (),
    "data.tokenizer": None,
    "input": None,
    "model.path": (),
    "model.weights": WEIGHTS,
    "out": None,
    "resume": (),
    "run": (),
    "run_dir": (),
    "snapshot": (),
    "weights": WEIGHTS,
}
"""Keys whose value is a path, each with the suffixes of its files: none for a directory, None for any file."""
MOST_PATHS = 1000
_SAFE_PATH = re.compile(r"[\w./@%+,:~-]+")
"""A shell expands the candidates it gets, so a name that could run a command must not be among them."""


def complete(words: list[str], hydra: Hydra) -> None:
    """Answer `gpipe -sc query=bash`, or pass `install=bash` to Hydra."""
    task, _, shell = (words or [""])[0].partition("=")
    if len(words) != 1 or task not in TASKS or shell not in SHELLS:
        given = " ".join(words)
        raise ConfigError(
            f"-sc {given}: choose one of: {', '.join(f'{name}=bash' for name in TASKS)}, or fish, or zsh"
        )
    if task == "query":
        try:
            candidates = _candidates(os.environ.get("COMP_LINE", ""), words, hydra)
        except Exception:  # noqa: BLE001 - a shell would print the message into the line that is being typed
            candidates = []
        sys.stdout.write(("\n" if shell == "fish" else " ").join(candidates) + "\n")
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
    key, equals, value = last.partition("=")
    if equals and key in PATH_KEYS and not (key == "snapshot" and command == "train"):
        return _paths(f"{key}=", value, PATH_KEYS[key])
    if command == "ls":
        return _starting_with(last, sorted({*TOPICS, *PLURALS}))
    if last.startswith("recipe.") and COMMANDS[command].configured and takes_recipes(command):
        return _starting_with(last, (f"{SCALE_KEY}={scale}" for scale in SCALES))
    if command == "cp" and " " not in rest.lstrip():
        if last.startswith("run/"):
            return _paths("run/", last.removeprefix("run/"), ())
        options = (f"{topic}/{option.name}" for topic in TOPICS for option in list_options(topic))
        return _starting_with(last, ("run/", *options))
    if command == LAUNCH_SCRIPT and " " in rest.lstrip():
        others = rest.lstrip().partition(" ")[2].split(" ")
        train = " ".join(word for word in others if word.partition("=")[0] not in COMMANDS[command].keys)
        own = _starting_with(last, (f"{key}=" for key in COMMANDS[command].keys))
        return [
            *own,
            *(word for word in _of_configuration("train", train, last, words, hydra) if word not in own),
        ]
    if not COMMANDS[command].configured:
        return _starting_with(last, _usage_words(command, last))
    return _of_configuration(command, rest.lstrip(), last, words, hydra)


def _usage_words(command: str, last: str) -> list[str]:
    """The keys in the usage of a command, such as `out=`, and the values that it lists, such as `format=hf`."""
    if command == LAUNCH_SCRIPT:
        return list(KINDS)
    usage = COMMANDS[command].usage
    if not last and re.match(r"gpipe \w+ \[?<", usage):  # a directory, which the shell itself completes
        return []
    pairs = re.findall(r"\b(\w+)=([\w|]*)", usage)
    return [f"{key}={value}" for key, values in pairs for value in values.split("|")]


def _of_configuration(command: str, rest: str, last: str, words: list[str], hydra: Hydra) -> list[str]:
    earlier = [word for word in rest.split(" ")[:-1] if "=" in word and not word.startswith("-")]
    own = [f"{key}=" for key in ("config", *([JOBS_KEY] if command == "train" else [])) if "=" not in last]
    candidates: list[str] = []
    with suppress(Exception):  # a mistake in an earlier word, which the command itself will report
        candidates = _of_hydra(command, [*_with_file(command, earlier), last], words, hydra)
    if earlier and not candidates:
        candidates = _of_hydra(command, [last], words, hydra)
    return [*candidates, *_starting_with(last, own)]


def _with_file(command: str, words: Sequence[str]) -> list[str]:
    """The words, with those of the file that `config=` names in its place: its options decide which keys there are."""
    from gpipe_cli.config.config_file import split_config_file

    file, others = split_config_file(command, words)
    return [*(file.words if file else ()), *others]


def _of_hydra(command: str, line: Sequence[str], words: list[str], hydra: Hydra) -> list[str]:
    """Keys and options. Hydra gets the words after the command, with `recipe` as its group `recipes`."""
    words_for_hydra = [word.replace("recipe=", "recipes=", 1) for word in line]
    os.environ["COMP_LINE"] = " ".join(["gpipe", *words_for_hydra])
    os.environ["COMP_POINT"] = str(len(os.environ["COMP_LINE"]))
    with redirect_stdout(StringIO()) as answer, redirect_stderr(StringIO()):
        hydra(command, words)
    known = {field.name for field in fields(SCHEMAS[command])} | {"recipe"}
    known -= set(NO_EFFECT.get(command, ()))
    # Hydra adds no equals sign to a group that contains options and folders, as recipes does.
    candidates = (re.sub(r"^recipes(=|$)", "recipe=", word) for word in answer.getvalue().split())
    return [word for word in candidates if override_group(word) in known]


def _paths(prefix: str, typed: str, suffixes: tuple[str, ...] | None) -> list[str]:
    """Folders, and files with one of the suffixes, whose path begins with what was typed."""
    folder, slash, start = typed.rpartition("/")
    paths = []
    try:
        for path in sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())[:MOST_PATHS]:
            if not path.name.startswith(start) or (path.name.startswith(".") and not start):
                continue
            if path.is_dir():
                paths.append(f"{folder}{slash}{path.name}/")
            elif suffixes is None or path.suffix in suffixes:
                paths.append(f"{folder}{slash}{path.name}")
    except (OSError, RuntimeError, ValueError):  # no such folder, no such user, not a name
        return []
    return [f"{prefix}{path}" for path in paths if _SAFE_PATH.fullmatch(path)]


def _starting_with(typed: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(typed)]
