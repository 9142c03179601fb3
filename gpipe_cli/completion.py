"""Tab completion of a command line: prints candidates, and never an error.

Keys and options come from the same table as the help. Nothing is composed, so that a Tab is answered at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpipe_cli.arguments import flags_of
from gpipe_cli.commands.ls import PLURALS, TOPICS
from gpipe_cli.config.checks import CHOICES
from gpipe_cli.config.keys import key_table, list_options
from gpipe_cli.config.schema import SCHEMAS
from gpipe_cli.config.words import SCALE_KEY, SCALES
from gpipe_cli.errors import ConfigError
from gpipe_cli.help import COMMANDS

HYDRA = {
    "hydra/launcher": ("basic", "joblib", "submitit_local", "submitit_slurm"),
    "hydra/sweeper": ("basic", "optuna"),
}
"""Groups of Hydra for sweeps, and the options that gpipe-cli[sweeps] installs."""
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
    *earlier, last = rest.lstrip().split(" ")
    if not space:
        return _starting_with(command, (*COMMANDS, "--help", "--version"))
    if command not in COMMANDS:
        return []
    if last.startswith("-"):
        return _starting_with(last, (name for flag in flags_of(command) for name in flag.names))
    if command == "ls":
        return _starting_with(last, sorted({*TOPICS, *PLURALS}))
    if command == "cp" and "=" not in last:
        options = (f"{topic}/{option.name}" for topic in TOPICS for option in list_options(topic))
        found = _paths("run/", last.removeprefix("run/"), ()) if last.startswith("run/") else []
        return [] if earlier else found or _starting_with(last, ("run/", *options))
    if command == "launch-script" and not earlier:
        return _starting_with(last, ("slurm", "torchrun"))
    if command not in SCHEMAS or (command in ("report", "runs") and not last):
        return []  # so that the shell offers its files
    return _keys_and_values(command, earlier, last)


def _keys_and_values(command: str, earlier: Sequence[str], last: str) -> list[str]:
    """Keys of the command and of the options that the earlier words choose; after `key=`, its values."""
    rows = {row.key: row for row in key_table(command, earlier)}
    key, equals, value = last.partition("=")
    if not equals:
        return _starting_with(last, (f"{name}=" for name in (*rows, *HYDRA)))
    if key in PATH_KEYS and key in rows:
        return _paths(f"{key}=", value, PATH_KEYS[key])
    values: Iterable[str] = {**CHOICES, **HYDRA, SCALE_KEY: SCALES}.get(key, ())
    if key in rows and rows[key].type == "group":
        values = (option.name for option in list_options("recipes" if key == "recipe" else key))
    elif key in rows and rows[key].default in ("true", "false"):
        values = ("true", "false")
    return _starting_with(last, (f"{key}={name}" for name in values))


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
