"""The keys of each command, and the options that ship with gpipe: the YAML files under conf/ and recipes/.

Imports neither Hydra nor torch, so that help, listing and completion stay quick.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from gpipe_cli.config.fields import ConfigKey, config_keys
from gpipe_cli.config.schema import COMPONENT_GROUPS, GROUPS, NO_EFFECT, POSITIONAL, SCHEMAS, SWEPT
from gpipe_cli.config.words import (
    CONFIG_MEANING,
    SCALE_KEY,
    SMALL,
    escape_references,
    override_key,
    quoted,
    sets_hydra,
)
from gpipe_cli.errors import ConfigError, did_you_mean, or_list

_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*=|~[A-Za-z_][\w.]*\Z")
QUOTES = "\"'"
LARGEST_FILE = 65_536
"""Bytes of a file of keys that help and completion read."""


@cache
def resources_dir() -> Path:
    """The folder that holds conf/ and recipes/: the installed package, or the root of a checkout."""
    package = Path(__file__).resolve().parent.parent
    return package if (package / "conf").is_dir() else package.parent


def conf_dir() -> Path:
    return resources_dir() / "conf"


@dataclass(frozen=True)
class Option:
    """One YAML file of a group."""

    name: str
    path: Path

    @property
    def description(self) -> str:
        """The first comment line of the file; lines that begin with @ are for Hydra."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        comments = (line.lstrip("# ") for line in lines if line.startswith("#"))
        return next((comment for comment in comments if not comment.startswith("@")), "")

    def notes(self, name: str) -> list[str]:
        """The comments `# name: text`; one that ends in a backslash goes on in the next line."""
        text = self.path.read_text(encoding="utf-8")
        found = re.findall(rf"^# {name}: ((?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
        return [note.replace("\n# ", "\n") for note in found]

    @property
    def keys(self) -> dict[str, tuple[str, str]]:
        """Each key with its default and its meaning, which is the comment on its line; `lora.rank` is nested."""
        keys: dict[str, tuple[str, str]] = {}
        path: list[str] = []
        text = self.path.read_text(encoding="utf-8")
        for indent, key, default, meaning in re.findall(
            r"^((?:  )*)(\w+): *(.*?)(?: *# (.*))?$", text, flags=re.MULTILINE
        ):
            path = [*path[: len(indent) // 2], key]
            keys.pop(".".join(path[:-1]), None)  # it has no value of its own
            if path[0] not in ("_target_", "defaults"):
                keys[".".join(path)] = (default, meaning)
        return keys

    @property
    def picks(self) -> dict[str, str]:
        """The options of other groups that the file chooses: the data of a model, the model of a recipe."""
        text = self.path.read_text(encoding="utf-8")
        return dict(re.findall(r"^  - override /(\w+)(?:@\S+)?: (\w+)$", text, flags=re.MULTILINE))

    @property
    def target(self) -> str | None:
        """The `_target_` of the file, if it has one."""
        match = re.search(r"^_target_: *([\w.]+)", self.path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        return None if match is None else match[1]

    @property
    def ignores(self) -> list[str]:
        """The keys that have no effect with an engine.

        Its module declares them in TRAITS. Importing the module would import torch, so its text is read.
        """
        module = f"{(self.target or '').rpartition('.')[0].replace('.', '/')}.py"
        text = (Path(__file__).parents[2] / module).read_text(encoding="utf-8")
        declared = re.search(r"ignored_keys=frozenset\(\s*\{(.*?)\}", text, flags=re.DOTALL)
        return [] if declared is None else re.findall(r'"([\w.]+)"', declared[1])

    @property
    def facts(self) -> dict[str, str]:
        """The pairs of a comment such as `# facts: parameters=11181642 layers=10`."""
        return dict(pair.split("=", 1) for line in self.notes("facts") for pair in line.split())


def list_options(group: str) -> list[Option]:
    """The shipped options of a group, sorted by name; `recipes` and `recipes/small` are groups too."""
    folder = resources_dir() / group if group.partition("/")[0] == "recipes" else conf_dir() / group
    return [Option(path.stem, path) for path in sorted(folder.glob("*.yaml"))]


def takes_recipes(command: str) -> bool:
    return "  - recipes: null\n" in _primary(command)


def default_options(command: str) -> dict[str, Option]:
    """The default option of each group that the command uses, as the command's primary config lists them."""
    return chosen_options(command, ())


def chosen_options(command: str, words: Iterable[str]) -> dict[str, Option]:
    """The option of each group that the command uses, if these words are given; none where it is not one of ours.

    The words choose before a recipe, and a recipe before its model, which picks matching data.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    recipes = _chosen_recipes(given)
    picks = {group: name for recipe in recipes for group, name in recipe.picks.items()}
    # A recipe may bring a component of its own. Both its keys and those of a word replace an option.
    replaced = {key for recipe in recipes for key in recipe.keys if key.partition(".")[0] not in given}
    replaced |= given.keys()
    default = dict(re.findall(r"^  - (?:override /)?(\w+): (\w+)$", _primary(command), flags=re.MULTILINE))
    picks |= {group: name for group, name in given.items() if group in default}
    models = {option.name: option for option in list_options("model")}
    model = models.get(picks.get("model") or default.get("model", ""))
    return {
        group: option
        for group, name in {**default, **({} if model is None else model.picks), **picks}.items()
        for option in list_options(group)
        if option.name == name
        and group not in NO_EFFECT.get(command, ())
        and f"{group}._target_" not in replaced
    }


def _chosen_recipes(given: Mapping[str, str]) -> list[Option]:
    """The recipe that the words name; at the small scale, what changes for it comes second."""
    scale, _, name = given.get("recipe", given.get("recipes", "")).rpartition("/")
    small = SMALL in (scale, given.get(SCALE_KEY))
    folders = ("recipes", f"recipes/{SMALL}") if small else ("recipes",)
    return [option for folder in folders for option in list_options(folder) if option.name == name]


def key_table(command: str, words: Sequence[str] = ()) -> list[ConfigKey]:
    """Every key that the command takes if these words are given: keys of its schema and of the chosen options.

    The default of a group is its option. A recipe on the line sets the defaults of its keys.
    """
    words = [*_words_of_file(words), *words]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    chosen, groups = chosen_options(command, words), groups_of(command)
    recipes = _chosen_recipes(given) if takes_recipes(command) else []
    rows = {"config": ConfigKey("config", "str", "null", CONFIG_MEANING)}
    if takes_recipes(command):
        meaning = "small makes a recipe for GPUs small enough to try on two CPU cores."
        rows[SCALE_KEY] = ConfigKey(SCALE_KEY, "str", "full", meaning)
        meaning = "A complete run, tested on two CPU cores."
        rows["recipe"] = ConfigKey("recipe", "group", given.get("recipe", ""), meaning)
    for row in config_keys(command):
        if row.type == "group" and row.key not in groups:
            continue  # the command takes keys of it, but no option
        option = chosen.get(row.key)
        default = rows[row.key].default if row.key in rows else row.default
        if row.type == "group":
            default = option.name if option else given.get(row.key, "")
        rows[row.key] = replace(row, default=default)
        for key, (value, meaning) in option.keys.items() if option else ():
            rows[f"{row.key}.{key}"] = ConfigKey(f"{row.key}.{key}", "", value, meaning, row.heading)
    for key, (value, _) in (item for recipe in recipes for item in recipe.keys.items()):
        group, _, name = key.partition(".")
        # A recipe may bring a component of its own, whose keys are not those of an option.
        if group not in given and (key in rows or (name != "_target_" and group not in chosen)):
            row = rows.get(key) or ConfigKey(key, "", "", "", rows[group].heading)
            rows[key] = replace(row, default=value)
    # As long as no engine is chosen, no key is left out: another engine may take it.
    is_chosen = "engine" in given or any("engine" in recipe.picks for recipe in recipes)
    ignored = tuple(
        f"{key}." for key in (chosen["engine"].ignores if is_chosen and "engine" in chosen else ())
    )
    return [row for row in rows.values() if not f"{row.key}.".startswith(ignored)]


def _words_of_file(words: Iterable[str]) -> list[str]:
    """The recipe and the options that a file of keys chooses; none if it cannot be read, which a run reports."""
    for path in (Path(word.removeprefix("config=")) for word in words if word.startswith("config=")):
        with suppress(OSError, ValueError):
            if path.is_file() and path.stat().st_size <= LARGEST_FILE:
                keys = Option("", path).keys
                chosen = {key: keys[key][0] for key in (*GROUPS, "recipe", SCALE_KEY) if key in keys}
                return [f"{key}={value.strip(QUOTES)}" for key, value in chosen.items()]
    return []


@cache
def known_keys(command: str) -> tuple[str, ...]:
    """Every key that the command has: those of its schema, and those of the shipped options of its groups."""
    groups = groups_of(command)
    own = [key.key for key in config_keys(command) if key.type != "group" or key.key in groups]
    inside = [
        f"{group}.{key}"
        for group in GROUPS
        if group in own
        for option in list_options(group)
        for key in option.keys
    ]
    of_recipes = ["recipe", SCALE_KEY] if takes_recipes(command) else []
    return (*own, "config", *dict.fromkeys(inside), *of_recipes)


def hint_for_unknown(key: str, command: str) -> str:
    """What to do about a key that the command does not have."""
    group, _, name = key.partition(".")
    if group == "hydra":
        return f"see `gpipe {command} --cfg hydra` for the keys of Hydra"
    known = known_keys(command)
    owners = [
        option.name
        for option in (list_options(group) if group in GROUPS and group in known else ())
        if any(f"{own}.".startswith(f"{name}.") for own in option.keys)
    ]
    if owners and name:
        return f"it belongs to {group}={'|'.join(owners)}"
    others = ", ".join(other for other in SCHEMAS if key in known_keys(other))
    top = [name for name in known if "." not in name]
    if suggestion := ("." not in key and did_you_mean(key, top)) or did_you_mean(key, known):
        return f"{suggestion} {key} belongs to gpipe {others}" if others else suggestion
    if others:
        return f"gpipe {command} does not have it; it belongs to gpipe {others}"
    return f"see `gpipe {command} --help` for every key"


def hint_for_flag(word: str, after: str, command: str) -> str:
    """`did you mean epochs=5?` for `--epochs 5`; empty if the command has no such key."""
    flag, equals, value = word.lstrip("-").partition("=")
    name = flag.replace("-", "_")
    keys = known_keys(command) if command in SCHEMAS else ()
    near = [key for key in keys if name in (key, key.partition(".")[0], key.rpartition(".")[2])]
    if not near or len(name) < 2:
        return ""
    value = value if equals else after if after and "=" not in after and not after.startswith("-") else "..."
    return f"did you mean {name if name in GROUPS else near[0]}={value}?"


def with_keys(words: Sequence[str], command: str) -> list[str]:
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


@cache
def _primary(command: str) -> str:
    """The text of the command's primary config, after that of the command that it begins with, if any."""
    text = (conf_dir() / f"{command}.yaml").read_text(encoding="utf-8")
    bases = [base for base in SCHEMAS if f"\n  - {base}\n" in text]
    return "".join([*map(_primary, bases), text])


def groups_of(command: str) -> set[str]:
    """The groups of which the command takes an option."""
    return {group for group in GROUPS if f"\n  - {group}: " in _primary(command)}


def check_words(command: str, words: Sequence[str], *, continues_run: bool) -> None:
    """Refuse words that this command cannot take, before Hydra composes anything."""
    types = {"config": "str", **{key.key: key.type for key in config_keys(command)}}
    own = {key.partition(".")[0] for key in types}
    groups = groups_of(command) | ({"recipe"} if takes_recipes(command) else set())
    lists = _list_keys(command)
    for word in words:
        key, (_, equals, value) = override_key(word), word.partition("=")
        group = key.partition(".")[0]
        if not equals and not word.startswith("~"):
            is_file = word.endswith((".yaml", ".yml"))
            cure = f"did you mean config={word}?" if is_file else f"see `gpipe {command} --help`"
            raise ConfigError(f"'{word}' is neither a flag nor key=value; {cure}")
        if key == "hydra.searchpath":
            raise ConfigError(f"{word}: name the folder by --config-dir, so that gpipe checks its files")
        if sets_hydra(word):
            if command not in SWEPT:
                raise ConfigError(f"{key}: gpipe {command} does not run through Hydra; leave it out")
            continue
        if key == "jobs":
            raise ConfigError(
                f"{word}: give hydra/launcher=joblib hydra.launcher.n_jobs={value or 2} to a sweep (-m) instead"
            )
        if group == "recipe" and (
            not takes_recipes(command) or (continues_run and "resume=auto" not in words)
        ):
            shown = f"{command} resume=..." if command == "train" else command
            raise ConfigError(f"recipe: gpipe {shown} takes none; its settings are those of its run")
        if group in NO_EFFECT.get(command, ()):
            raise ConfigError(f"{key}: has no effect on gpipe {command}; leave it out")
        if group not in own | groups or (group == "recipe" and key not in ("recipe", SCALE_KEY)):
            unknown = key if group == "recipe" else group
            raise ConfigError(f"unknown key '{unknown}'; {hint_for_unknown(unknown, command)}")
        if above := next((name for name in lists if key.startswith(f"{name}.")), None):
            raise ConfigError(f"{word}: {above} is a list; set it as a whole, {above}=[...]")
        # Components have keys of their own, and the value of a key without a type may be a mapping.
        inside = key != group and group not in (*COMPONENT_GROUPS, "recipe") and types.get(group) != ""
        if inside and not any(f"{name}.".startswith(f"{key}.") for name in types):
            raise ConfigError(f"unknown key '{key}'; {hint_for_unknown(key, command)}")
        members = [name for name in types if name.startswith(f"{key}.")]
        if (
            members
            and key not in groups
            and word[0] != "~"
            and (key in GROUPS or value[:1] not in ("{", "$"))
        ):
            raise ConfigError(f"{word}: holds several keys; set one of them, such as {members[0]}=...")
        if key in groups and word[0] != "~" and not is_option_name(value):
            raise ConfigError(f"{word}: {option_cure(key, value)}")


def option_cure(group: str, value: object) -> str:
    """What to do about a value that is not the name of an option."""
    names = [option.name for option in list_options("recipes" if group == "recipe" else group)]
    is_list = group == "balance" and str(value).startswith("[")
    manual = f"balance=manual balance.layers={str(value).replace(' ', '')}"
    return f"choose an option by its name; {manual if is_list else or_list('', names)}"


def is_option_name(value: str) -> bool:
    """Whether it names one option, or code of yours: not a number, a list, a reference or null."""
    return (
        bool(re.fullmatch(r"[\w./:-]+", value))
        and value not in ("null", "true", "false")
        and not value.isdigit()
    )


@cache
def _list_keys(command: str) -> tuple[str, ...]:
    own = [key.key for key in config_keys(command) if key.type == "list"]
    return (
        *own,
        *(
            f"{g}.{k}"
            for g in GROUPS
            for o in list_options(g)
            for k, (d, _) in o.keys.items()
            if d[:1] == "["
        ),
    )
