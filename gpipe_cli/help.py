"""The text of `gpipe --help` and `gpipe <command> --help`, from the table of keys and the files under conf/.

Imports neither Hydra nor torch.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from gpipe_cli.arguments import Invocation, flags_of
from gpipe_cli.config.keys import Option, conf_dir, key_table, list_options
from gpipe_cli.config.schema import FIRST, SCHEMAS, ConfigKey
from gpipe_cli.errors import ConfigError, did_you_mean, or_list

WIDTH = 80
NO_WORDS = Invocation()
LEFT = 28
"""The widest left column of a table; a longer name gets a line of its own."""


@final
@dataclass(frozen=True)
class Command:
    """A word after `gpipe`."""

    summary: str
    usage: str
    examples: tuple[str, ...]


PLAIN = {
    "ls": Command(
        "list models, datasets, recipes and other options",
        "gpipe ls [models|data|recipes|balance|schedules|engines|...] [--json]",
        ("gpipe ls", "gpipe ls models", "gpipe ls recipes", "gpipe ls models --json"),
    ),
    "env": Command(
        "describe this machine, ready to paste into an issue",
        "gpipe env [--json]",
        ("gpipe env", "gpipe env --json", "gpipe env > env.txt", "gpipe env --help"),
    ),
}
"""The commands without a file in conf/; the header of that file describes each of the others."""
COMMANDS = tuple(
    dict.fromkeys((*SCHEMAS, "launch-script", "check", "report", "runs", "export", "cp", *PLAIN))
)


def about(name: str) -> Command:
    """What the header of conf/<command>.yaml says of the command."""
    if name in PLAIN:
        return PLAIN[name]
    header = Option(name, conf_dir() / f"{name}.yaml")
    (usage,), examples = header.notes("usage"), header.notes("example")
    return Command(header.description, usage, tuple(examples))


def overview() -> str:
    """gpipe --help"""
    first, *_, sweep = about("train").examples
    examples = [
        first,
        "gpipe train model=resnet101 chunks=8     # more micro-batches",
        "gpipe ls models                          # list all models",
        sweep,
    ]
    read_on = {
        "gpipe <command> --help": "every key, option and flag of a command",
        "gpipe train model=hf --help": "the keys of what you choose",
        "gpipe train --help <word>": "only what matches the word",
        "gpipe ls": "models, data, recipes and other options",
        'eval "$(gpipe -sc install=bash)"': "complete commands with the Tab key",
    }
    return "\n\n".join(
        [
            "gpipe: train PyTorch models as a pipeline, from declarative configs.",
            "Usage: gpipe <command> [key=value ...] [flags]",
            _section("Commands", _table({name: about(name).summary for name in COMMANDS})),
            _section("Examples", examples),
            _section("Read on", _table(read_on, 34)),
        ]
    )


def command_help(name: str, invocation: Invocation = NO_WORDS) -> str:
    """gpipe <command> --help: of what the words choose, and only what matches the words after --help."""
    command, search = about(name), invocation.search.casefold()
    sections = _keys(name, invocation, each_option=bool(search)) if name in SCHEMAS else {}
    sections["Flags"] = {flag.usage: flag.help for flag in flags_of(name)}
    found = {
        title: {left: text for left, text in rows.items() if search in f"{left} {text}".casefold()}
        for title, rows in sections.items()
    }
    shown = [_section(title, _table(rows)) for title, rows in found.items() if rows]
    if search and not shown:
        names = [re.split(r"[=, ]", left)[-1] for rows in sections.values() for left in rows]
        hint = _other_option(name, search) or did_you_mean(search, names) or f"see `gpipe {name} --help`"
        raise ConfigError(f"nothing in the help of gpipe {name} matches '{search}'; {hint}")
    usage = textwrap.wrap(f"Usage: {command.usage}", WIDTH, subsequent_indent=" " * 7, break_on_hyphens=False)
    start = [f"gpipe {name}: {command.summary}.", "\n".join(usage), _section("Examples", command.examples)]
    return "\n\n".join(shown if search else [*start, *shown])


def _keys(command: str, invocation: Invocation, *, each_option: bool) -> dict[str, dict[str, str]]:
    """The groups, then the keys under their headings; each_option: with a row for each option."""
    groups: dict[str, str] = {}
    first: dict[str, str] = {}
    sections = {"Groups (group=option; * is chosen)": groups, f"{FIRST} (key=default)": first}
    for row in key_table(command, invocation.words):
        if row.type != "group":
            left = f"{row.key}={'[]' if row.type == 'list' else row.default.replace('???', '...')}"
            rows = first if row.heading == FIRST else sections.setdefault(row.heading, {})
            rows[left] = _meaning(row)
            continue
        options = list_options("recipes" if row.key == "recipe" else row.key)
        names = [option.name for option in options]
        if row.default and row.default not in names and ":" not in row.default and not invocation.config_dir:
            raise ConfigError(f"{row.key}={row.default}: {or_list(row.default, names)}")
        groups[row.key] = row.meaning if each_option else f"{row.meaning} {_names(options, row.default)}"
        if each_option:
            groups |= {f"{row.key}={option.name}": option.description for option in options}
    return sections


def _names(options: Iterable[Option], chosen: str) -> str:
    """The names of the options; nobody of us has run the recipes that need more devices than a test has."""
    names: dict[bool, list[str]] = {False: [], True: []}
    for option in options:
        names["devices" in option.facts].append(f"{option.name}{'*' if option.name == chosen else ''}")
    more = f" For eight GPUs, torchgpipe's benchmarks, not run by us: {', '.join(names[True])}."
    return f"Options: {', '.join(names[False])}.{more if names[True] else ''}"


def _meaning(row: ConfigKey) -> str:
    """What the key means, and what kind of number it takes where its default does not show that."""
    shows_type = row.default == "null" and row.type in ("int", "float")
    return f"{'required: ' if row.default == '???' else f'({row.type}) ' if shows_type else ''}{row.meaning}"


def _other_option(command: str, search: str) -> str:
    """Where to look for something that belongs to an option which is not chosen."""
    for group in (row.key for row in (key_table(command) if command in SCHEMAS else ())):
        for option in list_options(group):
            if any(search in f"{group}.{key} {text[1]}".casefold() for key, text in option.keys.items()):
                return f"try `gpipe {command} {group}={option.name} --help {search}`"
    return ""


def _section(title: str, lines: Iterable[str]) -> str:
    return f"{title}:\n" + textwrap.indent("\n".join(lines), "  ")


def _table(rows: Mapping[str, str], widest: int = LEFT) -> list[str]:
    """Two columns; the second wraps below itself."""
    left = min(max(map(len, rows)) + 2, widest)
    lines: list[str] = []
    for name, text in rows.items():
        wrapped = textwrap.wrap(text, WIDTH - 2 - left, break_on_hyphens=False) or [""]
        first = (
            textwrap.wrap(name, WIDTH - 2) if len(name) > left - 2 else [f"{name:<{left}}{wrapped.pop(0)}"]
        )
        lines += [line.rstrip() for line in (*first, *(" " * left + line for line in wrapped))]
    return lines
