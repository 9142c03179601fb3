"""The reference page of all keys: those of the commands from the schema, those of each option from its YAML.

It reads what `gpipe --help` reads, so the two always agree.
"""

from __future__ import annotations

from gpipe_cli.config.options import Option, default_options, list_options, takes_recipes
from gpipe_cli.config.schema import GROUPS, SCHEMAS, ConfigKey, config_keys
from make_docs.markdown import GENERATED, code, table

INTRODUCTION = """# Keys

Every setting is a key: `gpipe train chunks=8 optimizer.lr=0.01`. A **group** is a key whose value is one of several
options, each a small YAML file with keys of its own: `optimizer=sgd` selects the file, `optimizer.lr=0.01` sets one of
its keys. `gpipe <command> --help` prints the same reference, `gpipe ls` the options, and `gpipe <command> --cfg job`
the whole configuration.

An unknown key is an error, and so is a key that the chosen engine does not use."""


def page() -> str:
    parts = [
        GENERATED,
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
    """Each key once, with the commands that accept it."""
    fields_by_name: dict[str, ConfigKey] = {}
    users: dict[str, list[str]] = {}
    of_options = {
        f"{group}.{key}" for group in GROUPS for option in list_options(group) for key in option.keys
    }
    for command in SCHEMAS:
        for field in config_keys(command):
            if field.type != "group" and field.key not in of_options:
                # Another command may give a key a narrower meaning (`steps`): it gets a row of its own there.
                name = (
                    field.key
                    if fields_by_name.setdefault(field.key, field) == field
                    else f"{field.key} ({command})"
                )
                fields_by_name[name] = field
                users.setdefault(name, []).append(command)
    rows = [
        [code(field.key), field.type or "any", code(field.default), _users(users[name]), field.meaning]
        for name, field in fields_by_name.items()
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
    """One option, or one per command if they differ."""
    chosen = {command: default_options(command)[group].name for command in commands}
    if len(set(chosen.values())) == 1:
        return code(chosen[commands[0]])
    by_option: dict[str, list[str]] = {}
    for command, option in chosen.items():
        by_option.setdefault(option, []).append(command)
    return "; ".join(f"{code(option)} ({', '.join(users)})" for option, users in by_option.items())


def _group(group: str) -> list[str]:
    group_options = list_options(group)
    descriptions = table(
        ["option", "what it is"], [[code(option.name), _description(option)] for option in group_options]
    )
    rows = _option_rows(group, group_options)
    keys = [table(["key", "default", "options", "meaning"], rows)] if rows else []
    return [f"### {group}", descriptions, *keys]


def _option_rows(group: str, group_options: list[Option]) -> list[list[str]]:
    """The keys of all options; keys with the same name and meaning share a row."""
    users: dict[tuple[str, str], dict[str, str]] = {}
    for option in group_options:
        for key, (default, meaning) in option.keys.items():
            users.setdefault((key, meaning), {})[option.name] = default
    names = [option.name for option in group_options]
    return [
        [code(f"{group}.{key}"), _default(defaults), _which(list(defaults), names), meaning]
        for (key, meaning), defaults in users.items()
    ]


def _default(defaults: dict[str, str]) -> str:
    """The default of a key, for the options that have it."""
    different = dict.fromkeys(
        "the option's name" if default == option else "required" if default == "???" else code(default)
        for option, default in defaults.items()
    )
    return " or ".join(different)


def _which(options: list[str], all_options: list[str]) -> str:
    others = [name for name in all_options if name not in options]
    if not others:
        return "all"
    if len(others) < len(options):
        return f"all but {', '.join(others)}"
    return ", ".join(options)


def _description(option: Option) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in option.facts.items())
    return f"{option.description} ({facts})" if facts else option.description


def _recipes() -> list[str]:
    takers = ", ".join(command for command in SCHEMAS if takes_recipes(command))
    return [
        "## Recipes",
        f"Complete, proven runs for `gpipe {takers}`: `recipe=<name>`. "
        "`gpipe cp recipe/<name> <file>` copies a recipe to a file.",
        table(
            ["recipe", "what it is"],
            [[code(recipe.name), recipe.description] for recipe in list_options("recipes")],
        ),
    ]
