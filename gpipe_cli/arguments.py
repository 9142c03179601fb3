"""Parses the words after `gpipe <command>`: flags and overrides, in any order.

Imports nothing expensive, so that `gpipe --help` and completion stay quick.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import final

from gpipe_cli.config.keys import config_keys, known_keys
from gpipe_cli.config.schema import POSITIONAL, SCHEMAS, SWEPT, WITH_MODEL
from gpipe_cli.config.words import Request, check_characters, check_given_once
from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.values import escape_references, quoted

INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
CFG_PARTS = ("job", "hydra", "all")
DRY_RUN = ("train", "eval", "predict", "generate", "profile", "plan")
HYDRA = tuple(SCHEMAS)
_OVERRIDE = re.compile(r"[+~]{0,2}(?:hydra/)?[A-Za-z_][\w.@]*=|~[A-Za-z_][\w.]*\Z")


@final
@dataclass(frozen=True)
class Flag:
    """Its usage is its names, and a word for its value unless it is a switch. No commands: all take it."""

    usage: str
    help: str
    commands: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return re.findall(r"(?<!\S)--?[\w-]+", self.usage)


# Hydra's `--experimental-rerun` is missing on purpose: it loads a pickle.
FLAGS = (
    Flag("--help, -h", "show this help; with a word after it, only what matches it"),
    Flag("--by X", "balance by X; short for balance=X", WITH_MODEL),
    Flag("--json", "print the result as one JSON document on stdout"),
    Flag("--dry-run", "check everything, show partitions and memory, train nothing", DRY_RUN),
    Flag("--debug", "show the full traceback of an error"),
    Flag("-m, --multirun", "run a sweep: every combination of comma-separated values", SWEPT),
    Flag("-c, --cfg job", "print the composed configuration: job, hydra or all", HYDRA),
    Flag("--resolve", "with --cfg: fill in ${...}", HYDRA),
    Flag("-p, --package P", "with --cfg: print only this part of it", HYDRA),
    Flag("-i, --info X", f"print what Hydra knows: {', '.join(INFO_TOPICS)}", HYDRA),
    Flag("-cd, --config-dir D", "also search this folder for custom options", WITH_MODEL),
    Flag("-cn, --config-name N", "start from N.yaml in --config-dir instead", WITH_MODEL),
    Flag("--hydra-help", "show Hydra's own flags", HYDRA),
    Flag("--watch", "refresh the table on the terminal until Ctrl-C", ("runs",)),
    Flag("--version, -V", "print the version of gpipe"),
)


def flags_of(command: str) -> list[Flag]:
    return [flag for flag in FLAGS if not flag.commands or command in flag.commands]


def parse(arguments: list[str], command: str = "train") -> Request:
    if command != "launch-script":  # whose words are quoted in it, and `checks` judges those that name files
        check_characters(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in flags_of(command):
        is_switch = flag.usage.endswith(flag.names[-1])
        parser.add_argument(*flag.names, action="store_true" if is_switch else "store")
    # --info needs no topic, and argparse would take any word after it for one.
    words = [
        f"{word}=all" if word in ("--info", "-i") and after not in INFO_TOPICS else word
        for word, after in zip_longest(arguments, arguments[1:])
    ]
    try:
        namespace, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        flag_name = max(str(error.argument_name).split("/"), key=len)
        takes = "needs a value" if "expected" in error.message else "takes no value"
        raise ConfigError(f"{flag_name} {takes}") from error
    _refuse_flags(rest, command)
    values = vars(namespace)
    short = {"balance": values.pop("by", None), "watch": "true" if values.pop("watch", False) else None}
    overrides = [*_with_keys(rest, command), *(f"{key}={value}" for key, value in short.items() if value)]
    check_given_once(overrides)
    asked = next((at for at, word in enumerate(arguments) if word in ("--help", "-h")), len(arguments))
    search = " ".join(word for word in arguments[asked:] if word in rest and "=" not in word)
    request = Request(command, tuple(overrides), search, tuple(arguments), **values)
    _check_combinations(request)
    return request


def _refuse_flags(words: Sequence[str], command: str) -> None:
    """Refuse flags that the command does not have: `did you mean epochs=5?` for `--epochs 5`."""
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        if not word.startswith("-"):
            continue
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        keys = known_keys(command) if command in SCHEMAS else ()
        near = [key for key in keys if name in (key, key.partition(".")[0], key.rpartition(".")[2])]
        value = value if equals else after if re.fullmatch("[^-=][^=]*", after) else "..."
        key = f"did you mean {near[0]}={value}?" if near else ""
        takers = ", ".join(taker for known in FLAGS if flag in known.names for taker in known.commands)
        own = [known for each in flags_of(command) for known in each.names]
        hint = f"it belongs to gpipe {takers}" if takers else or_list(flag, own)
        raise ConfigError(f"unknown flag {flag}; {key or hint}")


def _with_keys(words: Sequence[str], command: str) -> list[str]:
    """The words, each with its key: `gpipe runs a=b` lists a folder of that name, whatever characters it has."""
    keys = POSITIONAL.get(command, ())
    if not keys:
        return list(words)
    own = config_keys(command)
    is_list = own[keys[0]].type == "list"
    if is_list:  # one member may stand without brackets
        words = [re.sub(rf"^{keys[0]}=(?=[^\['\"$])", "", word) for word in words]
    paths = [word for word in words if word.partition("=")[0] not in own and os.path.lexists(word)]
    bare = [word for word in words if word in paths or not _OVERRIDE.match(word)]
    given = [word for word in words if word not in bare]
    values = [quoted(escape_references(word)) for word in bare]
    if is_list:
        return [*given, f"{keys[0]}=[{','.join(values)}]"] if values else given
    filled = [f"{key}={value}" for key, value in zip(keys, values, strict=False)]
    return [*given, *filled, *bare[len(keys) :]]


def _check_combinations(request: Request) -> None:
    """Reject flags that exclude or need one another, which Hydra would ignore or answer with a traceback."""
    prints = {"--cfg": request.cfg, "--info": request.info, "--hydra-help": request.hydra_help}
    given = [flag for flag, value in {"--multirun": request.multirun, **prints}.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other; give one of them")
    if request.cfg not in (None, *CFG_PARTS):
        raise ConfigError(f"--cfg {request.cfg}: {or_list(str(request.cfg), CFG_PARTS)}")
    for flag, value in (("--resolve", request.resolve), ("--package", request.package)):
        if value and request.cfg is None:
            raise ConfigError(f"{flag} needs --cfg; it controls how a configuration is printed")
    for flag, value in (("--json", request.json), ("--dry-run", request.dry_run)):
        if value and any(prints.values()):
            raise ConfigError(f"{flag} has no effect with {given[0]}, which runs nothing; remove it")
