"""Tab completion of a command line: prints candidates, and never an error.

Keys and options come from the same table as the help. Nothing is composed, so that a Tab is answered at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpipe_cli.arguments import flag_names
from gpipe_cli.commands.ls import PLURALS, TOPICS
from gpipe_cli.config.keys import chosen_options, list_options, takes_recipes
from gpipe_cli.config.schema import GROUPS, config_keys
from gpipe_cli.config.words import SCALE_KEY, SCALES
from gpipe_cli.errors import ConfigError
from gpipe_cli.help import COMMANDS

LAUNCH_SCRIPT, KINDS = "launch-script", ("slurm", "torchrun")
TASKS = ("install", "uninstall", "query")
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


SCRIPTS = {
    "bash": """_gpipe() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##* }"
    mapfile -t COMPREPLY < <(COMP_LINE="$line" gpipe -sc query=bash)
    # Where bash takes `=` for the end of a word, it replaces only what comes after it.
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
    fi
}
complete -o nospace -o default -F _gpipe gpipe
""",
    "zsh": """_gpipe() {
    local -a candidates
    candidates=("${(@f)$(COMP_LINE="${BUFFER[1,CURSOR]}" gpipe -sc query=zsh)}")
    compadd -S '' -a candidates
}
compdef _gpipe gpipe
""",
    "fish": "complete -c gpipe -f -a '(COMP_LINE=(commandline -cp) gpipe -sc query=fish)'\n",
}
UNINSTALL = {"bash": "complete -r gpipe\n", "zsh": "compdef -d gpipe\n", "fish": "complete -c gpipe -e\n"}


def complete(words: list[str]) -> None:
    """Answer `gpipe -sc query=bash`, or print the script of `gpipe -sc install=bash`."""
    task, _, shell = (words or [""])[0].partition("=")
    if len(words) != 1 or task not in TASKS or shell not in SCRIPTS:
        given = " ".join(words)
        raise ConfigError(
            f"-sc {given}: choose one of: {', '.join(f'{name}=bash' for name in TASKS)}, or fish, or zsh"
        )
    if task != "query":
        sys.stdout.write((SCRIPTS if task == "install" else UNINSTALL)[shell])
        return
    try:
        candidates = _candidates(os.environ.get("COMP_LINE", ""))
    except Exception:  # noqa: BLE001 - a shell would print the message into the line that is being typed
        candidates = []
    sys.stdout.write("".join(f"{candidate}\n" for candidate in candidates))


def _candidates(line: str) -> list[str]:
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
    earlier = [word for word in rest.split(" ")[:-1] if "=" in word and not word.startswith("-")]
    if command == LAUNCH_SCRIPT and " " in rest.lstrip():
        own = _starting_with(last, (f"{key}=" for key in COMMANDS[command].keys))
        return [*own, *(word for word in _keys_and_options("train", earlier, last) if word not in own)]
    if not COMMANDS[command].configured:
        return _starting_with(last, _usage_words(command, last))
    return _keys_and_options(command, earlier, last)


def _usage_words(command: str, last: str) -> list[str]:
    """The keys in the usage of a command, such as `out=`, and the values that it lists, such as `format=hf`."""
    if command == LAUNCH_SCRIPT:
        return list(KINDS)
    usage = COMMANDS[command].usage
    if not last and re.match(r"gpipe \w+ \[?<", usage):  # a directory, which the shell itself completes
        return []
    pairs = re.findall(r"\b(\w+)=([\w|]*)", usage)
    return [f"{key}={value}" for key, values in pairs for value in values.split("|")]


def _keys_and_options(command: str, earlier: Sequence[str], last: str) -> list[str]:
    """Keys of the command and of the options that the earlier words choose; after `group=`, its options."""
    key, equals, _ = last.partition("=")
    chosen = chosen_options(command, earlier)
    if equals:
        group = "recipes" if key == "recipe" else key
        known = group in chosen or (group == "recipes" and takes_recipes(command))
        return _starting_with(last, (f"{key}={option.name}" for option in list_options(group) if known))
    own = dict.fromkeys(
        field.key if field.key.partition(".")[0] not in GROUPS else field.key.partition(".")[0]
        for field in config_keys(command)
    )
    inside = [f"{group}.{name}" for group, option in chosen.items() for name in option.keys]
    extra = ["config", *(["recipe", SCALE_KEY] if takes_recipes(command) else [])]
    return _starting_with(last, (f"{name}=" for name in (*own, *inside, *extra)))


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
