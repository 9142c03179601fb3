"""The text of `gpipe --help` and `gpipe <command> --help`, from the table of keys and the files under conf/.

Imports neither Hydra nor torch.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from gpipe_cli.arguments import flags_of
from gpipe_cli.config.keys import FIRST, ConfigKey, Option, conf_dir, key_table, list_options
from gpipe_cli.config.schema import SCHEMAS
from gpipe_cli.config.words import Request
from gpipe_cli.errors import ConfigError, did_you_mean, or_list
from gpipe_cli.report.formatting import whole_words
from gpipe_cli.report.output import terminal_width

WIDTH = 80
LEFT_SHARE = 0.35
"""Of the width, for the left column of a table; a longer name gets a line of its own."""
COMMANDS = (*SCHEMAS, "ls", "env")


def _width() -> int:
    return min(WIDTH, terminal_width(sys.stdout) or WIDTH)


def about(name: str) -> Option:
    """The header of the command's file in conf/ is its description."""
    return Option(name, conf_dir() / f"{name}.yaml")


def overview() -> str:
    """gpipe --help"""
    text = Path(__file__).with_name("overview.txt").read_text(encoding="utf-8").rstrip()
    commands = _section("Commands", {name: about(name).description for name in COMMANDS})
    return _fitted(text.format(commands=commands))


def command_help(name: str, request: Request | None = None) -> str:
    """gpipe <command> --help: of what the words choose, and only what matches the words after --help."""
    request = request or Request(name)
    command, search = about(name), request.search.casefold()
    sections = _keys(name, request) if name in SCHEMAS else {}
    sections["Flags"] = {flag.usage: flag.help for flag in flags_of(name)}
    found = [
        (title, {left: text for left, text in rows.items() if search in f"{left} {text}".casefold()})
        for title, rows in sections.items()
    ]
    shown = [_section(title, rows) for title, rows in found if rows]
    if search and not shown:
        names = [name for rows in sections.values() for left in rows for name in re.split("[=, ]", left)]
        hint = did_you_mean(search, names) or f"see `gpipe {name} --help`"
        raise ConfigError(f"nothing in the help of gpipe {name} matches '{search}'; {hint}")
    line, examples = f"Usage: {command.notes('usage')[0]}", "\n".join(command.notes("example"))
    usage = _wrapped(line, _width(), indent=" " * 7)
    start = [f"gpipe {name}: {command.description}.", "\n".join(usage)]
    start.append(f"Examples:\n{textwrap.indent(examples, '  ')}")
    return _fitted("\n\n".join(shown if search else [*start, *shown]))


def _fitted(text: str) -> str:
    """A terminal that is narrower than the help gets further rows that are indented."""
    if (width := _width()) == WIDTH:
        return text
    lines = text.splitlines()
    return "\n".join(whole_words(line, width, len(line) - len(line.lstrip()) + 4) for line in lines)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _keys(command: str, request: Request) -> dict[str, dict[str, str]]:
    """The groups, then the keys under their headings."""
    groups, first = "Groups (group=option; * is chosen)", f"{FIRST} (key=default)"
    sections: dict[str, dict[str, str]] = {groups: {}, first: {}}
    for row in key_table(command, request.words).values():
        rows = sections.setdefault(first if row.heading == FIRST else row.heading, {})
        if row.type == "group":
            sections[groups] |= _group(row, request)
            continue
        shown = row.default.replace("???", "...") or ("[]" if row.type == "list" else "")
        # The default shows the type of a key, except where it is null.
        kind = f"({row.type}) " if row.default == "null" and row.type in ("int", "float") else ""
        rows[f"{row.key}={shown}"] = f"{'required: ' if row.default == '???' else kind}{row.meaning}"
    return sections


def _group(row: ConfigKey, request: Request) -> dict[str, str]:
    """A group with its options. A search sees each option, and the keys that only options which are not chosen have."""
    options = {option.name: option for option in list_options(row.key)}
    is_name = re.fullmatch(r"\w+", row.default)  # neither code of the user nor several options of a sweep
    if is_name and row.default not in options and not request.config_dir:
        raise ConfigError(f"{row.key}={row.default}: {or_list(row.default, options)}")
    if not request.search:
        # Nobody of us has run the recipes that need more devices than a test has.
        there = ", ".join(name for name, option in options.items() if "devices" in option.facts)
        here = (
            f"{name}*" if name == row.default else name for name in options if name not in there.split(", ")
        )
        more = f" For eight GPUs, torchgpipe's benchmarks, not run by us: {there}." if there else ""
        return {row.key: f"{row.meaning} Options: {', '.join(here)}.{more}"}
    rows = {row.key: row.meaning}
    seen = {*options[row.default].keys} if row.default in options else set()
    for name, option in options.items():
        rows[f"{row.key}={name}"] = option.description
        own = {key: meaning for key, (_, meaning) in option.keys.items() if key not in seen}
        if row.key != "recipe":
            rows |= {f"{row.key}={name} {row.key}.{key}": meaning for key, meaning in own.items()}
        seen |= own.keys()
    return rows


def _section(title: str, rows: Mapping[str, str]) -> str:
    """A table of two columns; the second wraps below itself."""
    width = _width()
    left = min(max(map(len, rows)) + 2, int(LEFT_SHARE * width))
    lines = [f"{title}:"]
    for name, text in rows.items():
        wrapped = _wrapped(text, width - 2 - left) or [""]
        is_short = len(name) <= left - 2
        lines += [f"  {name:<{left}}{wrapped.pop(0)}"] if is_short else _wrapped(f"  {name}", width)
        lines += [" " * (left + 2) + line for line in wrapped]
    return "\n".join(map(str.rstrip, lines))
