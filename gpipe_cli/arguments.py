"""Parses the words after `gpipe <command>`: flags and overrides, in any order.

Imports nothing expensive, so that `gpipe --help` and completion stay quick.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from gpipe_cli.config.keys import known_keys
from gpipe_cli.config.schema import GROUPS, POSITIONAL, SCHEMAS, SWEPT, WITH_MODEL, config_keys
from gpipe_cli.config.words import (
    ANY_CHARACTER,
    check_given_once,
    escape_references,
    override_key,
    quoted,
    sets_hydra,
)
from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.report.formatting import hidden_character, no_hidden

INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
CFG_PARTS = ("job", "hydra", "all")


DRY_RUN = ("train", "eval", "predict", "generate", "profile", "plan")
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*=|~[A-Za-z_][\w.]*\Z")


@final
@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    help: str = ""
    """Empty for a flag that the help does not mention."""
    metavar: str = ""
    """Empty for a switch."""
    commands: Collection[str] | None = None
    """The commands that take it; None: all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `ArgumentParser.add_argument`."""


# Hydra's `--experimental-rerun` is missing on purpose: it loads a pickle.
FLAGS = (
    Flag(("--help", "-h")),
    Flag(("--by",), "balance by X; short for balance=X", "X", WITH_MODEL),
    Flag(("--json",), "print the result as one JSON document on stdout"),
    Flag(
        ("--dry-run",),
        "check everything and show the run's partitions and memory; no training, no run directory",
        commands=DRY_RUN,
    ),
    Flag(("--debug",), "show the full traceback of an error"),
    Flag(("-m", "--multirun"), "run a sweep: every combination of comma-separated values", commands=SWEPT),
    Flag(("-r", "--run"), commands=SWEPT),
    Flag(("-c", "--cfg"), "print the composed configuration: job, hydra or all", "job", SCHEMAS),
    Flag(("--resolve",), "with --cfg: fill in ${...}", commands=SCHEMAS),
    Flag(("-p", "--package"), "with --cfg: print only this part of the configuration", "P", SCHEMAS),
    Flag(
        ("-i", "--info"),
        f"print what Hydra knows: {', '.join(INFO_TOPICS)}",
        "X",
        SCHEMAS,
        options={"nargs": "?", "const": "all"},
    ),
    Flag(
        ("-cd", "--config-dir"),
        "search this folder for options too, under names that gpipe does not use",
        "D",
        WITH_MODEL,
    ),
    Flag(
        ("-cn", "--config-name"),
        "start from another primary config, such as N.yaml in --config-dir",
        "N",
        WITH_MODEL,
    ),
    Flag(("--hydra-help",), "show Hydra's own flags", commands=SCHEMAS),
    Flag(("--watch",), "refresh the table on the terminal until Ctrl-C", commands=("runs",)),
    Flag(("--version", "-V"), "print the version of gpipe"),
)


@final
@dataclass(frozen=True)
class Invocation:
    """One parsed command line."""

    words: tuple[str, ...] = ()
    """The overrides, or the arguments of a command without a configuration."""
    typed: tuple[str, ...] = field(default=(), compare=False)
    """Everything after the command, as it was typed."""
    help: bool = False
    version: bool = False
    json: bool = False
    dry_run: bool = False
    debug: bool = False
    multirun: bool = False
    run: bool = False
    hydra_help: bool = False
    resolve: bool = False
    cfg: str | None = None
    info: str | None = None
    package: str | None = None
    config_dir: str | None = None
    config_name: str | None = None

    @property
    def asks_hydra(self) -> bool:
        """Whether Hydra itself answers, and nothing runs."""
        return self.hydra_help or self.info is not None or self.cfg not in (None, "job")


def flags_of(command: str, *, configured: bool = True) -> list[Flag]:
    """The flags of a command; those of all commands, with a configuration or without one, if none is named."""
    return [
        flag
        for flag in FLAGS
        if flag.commands is None or (command in flag.commands if command else configured)
    ]


def flag_names(command: str = "", *, configured: bool = True) -> list[str]:
    return [name for flag in flags_of(command, configured=configured) for name in flag.names]


def parse(arguments: list[str], *, command: str = "train") -> Invocation:
    # The words of a script are quoted in it, and `checks` judges those that name files.
    for word in arguments if command != "launch-script" else ():
        if override_key(word) not in ANY_CHARACTER and (hidden := hidden_character(word)):
            raise ConfigError(f"{override_key(word)}: {no_hidden(hidden)}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in flags_of(command):
        switch: dict[str, Any] = {} if flag.metavar else {"action": "store_true"}
        parser.add_argument(*flag.names, **switch, **flag.options)
    # argparse would take any word after --info for its topic.
    following = [*arguments, ""][1:]
    words = [
        f"{word}=all" if word in ("--info", "-i") and after not in INFO_TOPICS else word
        for word, after in zip(arguments, following, strict=True)
    ]
    try:
        namespace, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        flag_name = max(str(error.argument_name).split("/"), key=len)
        takes = "needs a value" if "expected" in error.message else "takes no value"
        raise ConfigError(f"{flag_name} {takes}") from error
    values = vars(namespace)
    short = {"balance": values.pop("by", None), "watch": "true" if values.pop("watch", False) else None}
    for word, after in zip(rest, [*rest, ""][1:], strict=True):
        if word.startswith("-"):
            name = word.partition("=")[0]
            cure = _key_for_flag(word, after, command) if command in SCHEMAS else ""
            others = ", ".join(other for other in SCHEMAS if name in flag_names(other))
            cure = cure or (f"it belongs to gpipe {others}" if others else or_list(name, flag_names(command)))
            raise ConfigError(f"unknown flag {name}; {cure}")
    overrides = _with_keys(rest, command)
    overrides += [f"{key}={value}" for key, value in short.items() if value is not None]
    check_given_once(overrides)
    invocation = Invocation(tuple(overrides), tuple(arguments), **values)
    _check_combinations(invocation)
    return invocation


def _key_for_flag(word: str, after: str, command: str) -> str:
    """`did you mean epochs=5?` for `--epochs 5`; empty if the command has no such key."""
    flag, equals, value = word.lstrip("-").partition("=")
    name = flag.replace("-", "_")
    keys = known_keys(command)
    near = [key for key in keys if name in (key, key.partition(".")[0], key.rpartition(".")[2])]
    if not near or len(name) < 2:
        return ""
    value = value if equals else after if after and "=" not in after and not after.startswith("-") else "..."
    return f"did you mean {name if name in GROUPS else near[0]}={value}?"


def _with_keys(words: Sequence[str], command: str) -> list[str]:
    """The words, each with its key: `gpipe runs a=b` lists a folder of that name, whatever characters it has."""
    keys = POSITIONAL.get(command, ())
    if not keys:
        return list(words)
    types = {key.key: key.type for key in config_keys(command)}
    is_list = types[keys[0]] == "list"
    given, bare = [], []
    for word in words:
        key, _, value = word.partition("=")
        sets_key = _OVERRIDE.match(word) or ("=" in word and sets_hydra(word))
        if is_list and key == keys[0] and value[:1] not in ("", "[", "$", "'", '"'):
            bare.append(value)  # one member, without brackets
        elif sets_key and (key in types or not os.path.lexists(word)):
            given.append(word)
        else:
            bare.append(word)
    values = [quoted(escape_references(word)) for word in bare]
    if is_list:
        return [*given, f"{keys[0]}=[{','.join(values)}]"] if values else given
    filled = [f"{key}={value}" for key, value in zip(keys, values, strict=False)]
    return [*given, *filled, *bare[len(keys) :]]


def _check_combinations(invocation: Invocation) -> None:
    """Reject flags that exclude or need one another, which Hydra would ignore or answer with a traceback."""
    prints = {"--cfg": invocation.cfg, "--info": invocation.info, "--hydra-help": invocation.hydra_help}
    modes = {"--multirun": invocation.multirun, "--run": invocation.run, **prints}
    given = [flag for flag, value in modes.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other; give one of them")
    if invocation.cfg not in (None, *CFG_PARTS):
        raise ConfigError(f"--cfg {invocation.cfg}: {or_list(str(invocation.cfg), CFG_PARTS)}")
    for flag, value in (("--resolve", invocation.resolve), ("--package", invocation.package)):
        if value and invocation.cfg is None:
            raise ConfigError(f"{flag} needs --cfg; it controls how a configuration is printed")
    for flag, value in (("--json", invocation.json), ("--dry-run", invocation.dry_run)):
        if value and any(prints.values()):
            raise ConfigError(f"{flag} has no effect with {given[0]}, which runs nothing; leave it out")
