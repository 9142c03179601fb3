"""The page of every key: those of the commands from the schema, those of each option from its YAML.

Reads what `gpipe --help` reads, so the two cannot differ.
"""

from __future__ import annotations

from gpipe_cli.config.options import Option, default_options, list_options, takes_recipes
from gpipe_cli.config.schema import GROUPS, SCHEMAS, ConfigKey, config_keys
from make_docs.markdown import MADE, code, table

__all__ = ["page"]

INTRODUCTION = """# Keys

Every setting is a key: `gpipe train chunks=8 optimizer.lr=0.01`. A **group** is a key whose value is one of several
options, each a small YAML file with keys of its own: `optimizer=sgd` takes the file, `optimizer.lr=0.01` sets a key of
it. `gpipe <command> --help` shows the same, `gpipe ls` the options, `gpipe <command> --cfg job` the whole
configuration.

A key that does not exist is an error, and so is one that is given though the chosen engine does not use it."""


def page() -> str:
    parts = [
        MADE,
        INTRODUCTION,
        "## Keys of the commands",
        _commands_table(),
        "## Groups",
        _groups_table(),
        *(part for group in GROUPS for part in _group(group)),
        *_recipes(),
    ]
    return "\n\n".join(parts) + "\n"


def _commands_table() -> str:
    """Each key once, with the commands that have it."""
    known: dict[str, ConfigKey] = {}
    users: dict[str, list[str]] = {}
    of_options = {
        f"{group}.{key}" for group in GROUPS for option in list_options(group) for key in option.keys
    }
    for command in SCHEMAS:
        for field in config_keys(command):
            if field.type != "group" and field.key not in of_options:
                # The same key may mean something narrower elsewhere (`steps`): what differs is a row of its own.
                name = (
                    field.key if known.setdefault(field.key, field) == field else f"{field.key} ({command})"
                )
                known[name] = field
                users.setdefault(name, []).append(command)
    rows = [
        [code(field.key), field.type or "any", code(field.default), _users(users[name]), field.meaning]
        for name, field in known.items()
    ]
    return table(["key", "type", "default", "commands", "meaning"], rows)


def _groups_table() -> str:
    rows = []
    for group in GROUPS:
        users = [command for command in SCHEMAS if group in default_options(command)]
        meaning = next(
            field.meaning for field in config_keys(users[0]) if field.key.partition(".")[0] == group
        )
        rows.append([f"[`{group}`](#{group})", _defaults(group, users), _users(users), meaning])
    return table(["group", "default", "commands", "meaning"], rows)


def _users(commands: list[str]) -> str:
    return "all" if commands == list(SCHEMAS) else ", ".join(commands)


def _defaults(group: str, commands: list[str]) -> str:
    """One option, or those of each command where they differ."""
    chosen = {command: default_options(command)[group].name for command in commands}
    if len(set(chosen.values())) == 1:
        return code(chosen[commands[0]])
    by_option: dict[str, list[str]] = {}
    for command, option in chosen.items():
        by_option.setdefault(option, []).append(command)
    return "; ".join(f"{code(option)} ({', '.join(users)})" for option, users in by_option.items())


def _group(group: str) -> list[str]:
    found = list_options(group)
    described = table(["option", "what it is"], [[code(one.name), _description(one)] for one in found])
    rows = _option_rows(group, found)
    keys = [table(["key", "default", "options", "meaning"], rows)] if rows else []
    return [f"### {group}", described, *keys]


def _option_rows(group: str, found: list[Option]) -> list[list[str]]:
    """The keys of all options; those with one meaning share a row."""
    users: dict[tuple[str, str], dict[str, str]] = {}
    for option in found:
        for key, (default, meaning) in option.keys.items():
            users.setdefault((key, meaning), {})[option.name] = default
    everyone = [option.name for option in found]
    return [
        [code(f"{group}.{key}"), _default(defaults), _which(list(defaults), everyone), meaning]
        for (key, meaning), defaults in users.items()
    ]


def _default(defaults: dict[str, str]) -> str:
    """Of a key that these options have."""
    said = {"???": "must be given"}
    different = dict.fromkeys(
        "the option's name" if default == option else said.get(default, code(default))
        for option, default in defaults.items()
    )
    return " or ".join(different)


def _which(list_options: list[str], everyone: list[str]) -> str:
    left_out = [name for name in everyone if name not in list_options]
    if not left_out:
        return "all"
    if len(left_out) < len(list_options):
        return f"all but {', '.join(left_out)}"
    return ", ".join(list_options)


def _description(option: Option) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in option.facts.items())
    return f"{option.description} ({facts})" if facts else option.description


def _recipes() -> list[str]:
    takers = ", ".join(command for command in SCHEMAS if takes_recipes(command))
    return [
        "## Recipes",
        f"Whole proven runs, for `gpipe {takers}`: `recipe=<name>`. `gpipe cp recipe/<name> <file>` copies one.",
        table(
            ["recipe", "what it is"], [[code(one.name), one.description] for one in list_options("recipes")]
        ),
    ]
