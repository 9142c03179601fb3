"""Parses the words after `gpipe <command>`: flags and overrides, in any order.

Imports nothing expensive, so that `gpipe --help` and completion stay quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from gpipe_cli.config.keys import known_keys
from gpipe_cli.config.schema import GROUPS
from gpipe_cli.config.words import ANY_CHARACTER, check_given_once, override_key
from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.report.formatting import hidden_character, no_hidden

INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
CFG_PARTS = ("job", "hydra", "all")


@final
@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    help: str = ""
    """Empty for a flag that the help does not mention."""
    metavar: str = ""
    """Empty for a switch."""
    plain: bool = False
    """Whether commands without a configuration take it too."""
    only: str = ""
    """The only command that takes it, if there is just one."""
    also: str = ""
    """A command without a configuration that takes it too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `ArgumentParser.add_argument`."""


# Hydra's `--experimental-rerun` is missing on purpose: it loads a pickle.
FLAGS = (
    Flag(("--help", "-h"), plain=True),
    Flag(("--by",), "balance by X; short for balance=X", "X"),
    Flag(("--json",), "print the result as one JSON document on stdout", plain=True),
    Flag(
        ("--dry-run",),
        "check everything and show the run's partitions and memory; no training, no run directory",
    ),
    Flag(("--debug",), "show the full traceback of an error", plain=True),
    Flag(("-m", "--multirun"), "run a sweep: every combination of comma-separated values"),
    Flag(("-r", "--run")),
    Flag(("-c", "--cfg"), "print the composed configuration: job, hydra or all", "job"),
    Flag(("--resolve",), "with --cfg: fill in ${...}"),
    Flag(("-p", "--package"), "with --cfg: print only this part of the configuration", "P"),
    Flag(
        ("-i", "--info"),
        f"print what Hydra knows: {', '.join(INFO_TOPICS)}",
        "X",
        options={"nargs": "?", "const": "all"},
    ),
    Flag(
        ("-cd", "--config-dir"),
        "search this folder for options too, under names that gpipe does not use",
        "D",
        also="launch-script",
    ),
    Flag(
        ("-cn", "--config-name"),
        "start from another primary config, such as N.yaml in --config-dir",
        "N",
        also="launch-script",
    ),
    Flag(("--hydra-help",), "show Hydra's own flags"),
    Flag(("--watch",), "refresh the table on the terminal until Ctrl-C", plain=True, only="runs"),
    Flag(("--version", "-V"), "print the version of gpipe", plain=True),
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
    watch: bool = False
    cfg: str | None = None
    info: str | None = None
    package: str | None = None
    config_dir: str | None = None
    config_name: str | None = None

    @property
    def asks_hydra(self) -> bool:
        """Whether Hydra itself answers, and nothing runs."""
        return self.hydra_help or self.info is not None or self.cfg not in (None, "job")


def flags_of(command: str, *, configured: bool) -> list[Flag]:
    """The flags of a command, which has a configuration or has none."""
    return [
        flag
        for flag in FLAGS
        if (configured or flag.plain or (command and flag.also == command)) and flag.only in ("", command)
    ]


def flag_names(command: str = "", *, configured: bool) -> list[str]:
    return [name for flag in flags_of(command, configured=configured) for name in flag.names]


def parse(arguments: list[str], *, configured: bool = True, command: str = "") -> Invocation:
    # The words of a script are quoted in it, and `checks` judges those that name files.
    for word in arguments if command != "launch-script" else ():
        if override_key(word) not in ANY_CHARACTER and (hidden := hidden_character(word)):
            raise ConfigError(f"{override_key(word)}: {no_hidden(hidden)}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in flags_of(command, configured=configured):
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
    by = values.pop("by", None)
    for word, after in zip(rest, [*rest, ""][1:], strict=True):
        if word.startswith("-"):
            name = word.partition("=")[0]
            cure = _key_for_flag(word, after, command) if configured else ""
            cure = cure or or_list(name, flag_names(command, configured=configured))
            raise ConfigError(f"unknown flag {name}; {cure}")
    overrides = [*rest, *([] if by is None else [f"balance={by}"])]
    check_given_once(overrides)
    invocation = Invocation(tuple(overrides), tuple(arguments), **values)
    _check_combinations(invocation)
    return invocation


def _key_for_flag(word: str, after: str, command: str) -> str:
    """`did you mean epochs=5?` for `--epochs 5`; empty if the command has no such key."""
    flag, equals, value = word.lstrip("-").partition("=")
    name = flag.replace("-", "_")
    keys = known_keys(command or "train")
    near = [key for key in keys if name in (key, key.partition(".")[0], key.rpartition(".")[2])]
    if not near or len(name) < 2:
        return ""
    value = value if equals else after if after and "=" not in after and not after.startswith("-") else "..."
    return f"did you mean {name if name in GROUPS else near[0]}={value}?"


def parse_keys(words: Sequence[str], values: Mapping[str, str]) -> dict[str, str]:
    """The `key=value` words of a command without a configuration; `values` says what each key takes."""
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in values:
            raise ConfigError(f"unknown key '{key}'; {or_list(key, values)}")
        if not equals or not value:
            raise ConfigError(f"{key}: give {key}=<{values[key]}>")
        given[key] = value
    return given


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
