"""The keys of each command, and the options that ship with gpipe: the YAML files under conf/ and recipes/.

The classes of `schema` have the types and defaults, and keys.ini has the meanings, under the headings of the help. YAML
keeps no comments, so the texts of options are read. Imports neither Hydra nor torch, so that help, listing and
completion stay quick.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from configparser import RawConfigParser
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import chain, starmap
from pathlib import Path
from typing import Any, final

from gpipe_cli.config import schema
from gpipe_cli.config.schema import COMPONENT_GROUPS, GROUPS, NO_EFFECT, SCHEMAS, SWEPT
from gpipe_cli.config.words import SCALE_KEY, SMALL, Request, override_key, sets_hydra
from gpipe_cli.errors import ConfigError, did_you_mean, or_list

FIRST = "Keys"
"""The heading of the keys that matter most, and of keys that stand below no heading."""
MAX_KEYS_BYTES = 65_536
"""Bytes of a file of keys that help and completion read."""
CONFIG_KEY = ("config", "str", "null")
RECIPE_KEYS = (("recipe", "group", ""), (SCALE_KEY, "str", "full"))
QUOTES = "\"'"
HINTS = {
    "allow": "gpipe {command} runs no code of yours; remove it",
    "hydra": "see `gpipe {command} --cfg hydra` for the keys of Hydra",
    "jobs": "give hydra/launcher=joblib hydra.launcher.n_jobs=2 to a sweep (-m) instead",
    "model.pretrained": "give model.weights=<file>, because gpipe downloads nothing",
}
"""What to do about keys that are not ours."""


@final
@dataclass(frozen=True)
class ConfigKey:
    """One key of a command, as help and the reference show it; `default` is written as on the command line."""

    key: str
    type: str
    default: str
    meaning: str
    heading: str = FIRST


@cache
def resources_dir() -> Path:
    """The folder that holds conf/ and recipes/: the installed package, or the root of a checkout."""
    package = Path(__file__).resolve().parent.parent
    return package if (package / "conf").is_dir() else package.parent


def conf_dir() -> Path:
    return resources_dir() / "conf"


@final
@dataclass(frozen=True)
class Option:
    """One YAML file of a group."""

    name: str
    path: Path

    def find(self, pattern: str) -> list[Any]:
        """What the groups of the pattern match in the file; ^ and $ match at the ends of each line."""
        return re.findall(pattern, self.path.read_text(encoding="utf-8"), flags=re.MULTILINE)

    @property
    def description(self) -> str:
        """The first comment line of the file; lines that begin with @ are for Hydra."""
        return str(next(iter(self.find("^# (?!@)(.+)$")), ""))

    def notes(self, name: str) -> list[str]:
        """The comments `# name: text`; one that ends in a backslash goes on in the next line."""
        return [note.replace("\n# ", "\n") for note in self.find(rf"^# {name}: ((?:.*\\\n)*.*)$")]

    @property
    def facts(self) -> dict[str, str]:
        """The pairs of a comment such as `# facts: parameters=11181642 layers=10`."""
        return dict(pair.split("=", 1) for line in self.notes("facts") for pair in line.split())

    @property
    def keys(self) -> dict[str, tuple[str, str]]:
        """Each key with its default and its meaning, which is the comment on its line; `lora.rank` is nested."""
        keys: dict[str, tuple[str, str]] = {}
        path: list[str] = []
        for indent, key, default, meaning in self.find(r"^((?:  )*)(\w+): *(.*?)(?: *# (.*))?$"):
            path = [*path[: len(indent) // 2], key]
            keys.pop(".".join(path[:-1]), None)  # it has no value of its own
            if path[0] not in ("_target_", "defaults"):
                keys[".".join(path)] = (default, meaning)
        return keys

    @property
    def choices(self) -> dict[str, str]:
        """The options that the file chooses: the data of a model, the model of a recipe, all of a command."""
        return dict(self.find(r"^  - (?:override /)?(\w+)(?:@\S+)?: (\w+)$"))

    @property
    def target(self) -> str | None:
        """The `_target_` of the file, if it has one."""
        return next(iter(self.find(r"^_target_: *([\w.]+)")), None)

    @property
    def ignores(self) -> list[str]:
        """The keys that have no effect with an engine.

        Its module declares them in TRAITS. Importing the module would import torch, so its text is read.
        """
        module = f"{(self.target or '').rpartition('.')[0].replace('.', '/')}.py"
        declared = Option(module, Path(__file__).parents[2] / module).find(
            r"ignored_keys=frozenset\(\s*\{([^}]*)\}"
        )
        return re.findall(r'"([\w.]+)"', "".join(declared))


def list_options(group: str) -> list[Option]:
    """The shipped options of a group, sorted by name; `recipe` and `recipes/small` are groups too."""
    group = "recipes" if group == "recipe" else group
    folder = (resources_dir() if group.startswith("recipes") else conf_dir()) / group
    return [Option(path.stem, path) for path in sorted(folder.glob("*.yaml"))]


def _fields(schema_class: Any, above: str = "") -> Iterator[tuple[str, str, str]]:
    """Each key of a class of the schema, nested ones by their dotted path, with its type and default as text."""
    kinds = {"Any": "", "list[str]": "list", "dict[str, Any]": "group"}
    for each in fields(schema_class):
        annotation, key = str(each.type), f"{above}{each.name}"
        nested = getattr(schema, annotation, None)
        if not is_dataclass(nested):
            default = "" if each.default is MISSING else json.dumps(each.default).strip('"')
            yield key, kinds.get(annotation, annotation.removesuffix(" | None")), default
            continue
        if key in GROUPS:
            yield key, "group", ""
        yield from _fields(nested, f"{key}.")


@cache
def _meanings(command: str) -> dict[str, tuple[str, str]]:
    """The meaning of each key and the heading above it, in the order of the help."""
    texts = RawConfigParser(delimiters=":")
    texts.read(Path(__file__).with_suffix(".ini"), encoding="utf-8")
    found = {}
    for heading in texts.sections():
        for name, text in texts.items(heading):
            key, _, only = name.partition(" of ")
            if only == command or (not only and f"{key} of {command}" not in chain(*texts.values())):
                found[key] = (" ".join(text.split()), heading)
    return found


@cache
def _default_choices(command: str) -> dict[str, str]:
    """The default option of each group, in the command's primary config and in the command that it begins with."""
    primary = Option(command, conf_dir() / f"{command}.yaml")
    bases = [base for base in primary.find("^  - ([a-z]+)$") if base in SCHEMAS]
    return {**(_default_choices(bases[0]) if bases else {}), **primary.choices}


def groups_of(command: str) -> set[str]:
    """The groups of which the command takes an option."""
    return _default_choices(command).keys() & set(GROUPS)


@cache
def config_keys(command: str) -> dict[str, ConfigKey]:
    """The keys of the command, without those of options, in the order of the help."""
    unused = {*GROUPS} - groups_of(command) | {*NO_EFFECT.get(command, ())}
    recipe = RECIPE_KEYS if "recipes" in _default_choices(command) else ()
    meanings = _meanings(command)
    rows = {
        key: ConfigKey(key, kind, default, *meanings.get(key, ("", FIRST)))
        for key, kind, default in (CONFIG_KEY, *recipe, *_fields(SCHEMAS[command]))
        if key not in unused
    }
    return {key: rows[key] for key in (*filter(rows.__contains__, meanings), *rows)}


@cache
def known_keys(command: str) -> dict[str, ConfigKey]:
    """Every key that the command has: its own, and those of all shipped options of its groups."""
    return _with_values(
        command, (_values(group, option) for group in GROUPS for option in list_options(group))
    )


def key_table(command: str, words: Sequence[str] = ()) -> dict[str, ConfigKey]:
    """Every key that the command takes if these words are given: its own, and those of the chosen options.

    The default of a group is its option. A recipe on the line sets the defaults of its keys.
    """
    words = [*_words_of_file(words), *words]
    chosen, (picks, recipe) = chosen_options(command, words), _picks(words)
    names = {group: (name, "") for group, name in picks.items() if group in (*GROUPS, "recipe")}
    rows = _with_values(command, [names, *starmap(_values, chosen.items()), recipe])
    # As long as no engine is chosen, no key is left out: another engine may take it.
    ignores = chosen["engine"].ignores if "engine" in picks and "engine" in chosen else []
    ignored = tuple(f"{key}." for key in ignores)
    return {key: row for key, row in rows.items() if not f"{key}.".startswith(ignored)}


def _with_values(command: str, layers: Iterable[Mapping[str, tuple[str, str]]]) -> dict[str, ConfigKey]:
    """The command's own keys with the defaults and the further keys that the layers have; the last one decides."""
    rows = dict(config_keys(command))
    for key, (value, meaning) in (item for layer in layers for item in layer.items()):
        group = key.partition(".")[0]
        if (group in rows or key in rows) and not key.endswith("._target_"):
            row = rows.get(key) or ConfigKey(key, "", "", meaning, rows[group].heading)
            rows[key] = replace(row, default=value)
    return rows


def _values(group: str, option: Option) -> dict[str, tuple[str, str]]:
    return {group: (option.name, ""), **{f"{group}.{key}": value for key, value in option.keys.items()}}


def chosen_options(command: str, words: Iterable[str] = ()) -> dict[str, Option]:
    """The option of each group that the command uses, if these words are given; none where it is not one of ours.

    The words choose before a recipe, and a recipe before its model, which picks matching data.
    """
    default, (picks, recipe) = _default_choices(command), _picks(words)
    model = picks.get("model") or default.get("model")
    matching = [option.choices for option in list_options("model") if option.name == model]
    names = {**default, **dict(*matching), **picks}
    return {
        group: option
        for group in GROUPS
        if group in config_keys(command) and f"{group}._target_" not in {**picks, **recipe}
        for option in list_options(group)
        if option.name == names[group]
    }


def _picks(words: Iterable[str]) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """What the words give, before them the options of their recipe; and the other keys of the recipe.

    A recipe may bring a component of its own, whose keys have no effect if the words choose another.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    scale, _, name = given.get("recipe", given.get("recipes", "")).rpartition("/")
    small = [f"recipes/{SMALL}"] if SMALL in (scale, given.get(SCALE_KEY)) else []  # what changes for it
    recipes = [
        option for folder in ["recipes", *small] for option in list_options(folder) if option.name == name
    ]
    chosen = dict(item for recipe in recipes for item in recipe.choices.items())
    values = dict(item for recipe in recipes for item in recipe.keys.items())
    kept = {key: value for key, value in values.items() if key.partition(".")[0] not in given}
    return {**chosen, **given}, kept


def _words_of_file(words: Iterable[str]) -> list[str]:
    """The recipe and the options that a file of keys chooses; none if it cannot be read, which a run reports."""
    path = Path(next((word for word in words if word.startswith("config=")), "").removeprefix("config="))
    with suppress(OSError, ValueError):
        if path.is_file() and path.stat().st_size <= MAX_KEYS_BYTES:
            values = Option(path.name, path).keys.items()
            choosing = (*GROUPS, "recipe", SCALE_KEY)
            return [f"{key}={value.strip(QUOTES)}" for key, (value, _) in values if key in choosing]
    return []


def hint_for_unknown(key: str, command: str) -> str:
    """What to do about a key that the command does not have."""
    group, _, name = key.partition(".")
    if hint := HINTS.get(key) or HINTS.get(group):
        return hint.format(command=command)
    known = known_keys(command)
    owners = [
        option.name
        for option in (list_options(group) if name and group in COMPONENT_GROUPS and group in known else ())
        if any(f"{own}.".startswith(f"{name}.") for own in option.keys)
    ]
    if owners:
        return f"it belongs to {group}={'|'.join(owners)}"
    others = ", ".join(other for other in SCHEMAS if key in known_keys(other))
    top = [own for own in known if "." not in own]
    if suggestion := (not name and did_you_mean(key, top)) or did_you_mean(key, known):
        return f"{suggestion} {key} belongs to gpipe {others}" if others else suggestion
    if others:
        return f"gpipe {command} does not have it; it belongs to gpipe {others}"
    return f"see `gpipe {command} --help` for every key"


def check_words(request: Request) -> None:
    """Refuse words that the command cannot take, before Hydra composes anything."""
    command, words = request.command, request.words
    for word in words:
        key = override_key(word)
        if "=" not in word and not word.startswith("~"):
            is_file = word.endswith((".yaml", ".yml"))
            hint = f"did you mean config={word}?" if is_file else f"see `gpipe {command} --help`"
            raise ConfigError(f"'{word}' is neither a flag nor key=value; {hint}")
        if key == "hydra.searchpath":
            raise ConfigError(f"{word}: name the folder by --config-dir, so that gpipe checks its files")
        if not sets_hydra(word):
            _check_key(command, word)
        elif command not in SWEPT:
            raise ConfigError(f"{key}: gpipe {command} does not run through Hydra; remove it")
        if key in ("recipe", SCALE_KEY) and request.continues_run and "resume=auto" not in words:
            raise ConfigError(f"{key}: gpipe {command} resume=... takes none; its run has the settings")


def _check_key(command: str, word: str) -> None:
    key, (_, equals, value) = override_key(word), word.partition("=")
    group = key.partition(".")[0]
    own, sets = config_keys(command), equals and word[0] != "~"
    if group in NO_EFFECT.get(command, ()):
        raise ConfigError(f"{key}: has no effect on gpipe {command}; remove it")
    for above, row in known_keys(command).items():
        if key.startswith(f"{above}.") and (row.type == "list" or row.default.startswith("[")):
            raise ConfigError(f"{word}: {above} is a list; set it as a whole, '{above}=[...]'")
    members = [name for name in own if name.startswith(f"{key}.")]
    # Components have keys of their own, and the value of a key without a type may be a mapping.
    is_open = group in own and (group in COMPONENT_GROUPS or own[group].type == "")
    if key not in own and not members and not is_open:
        raise ConfigError(f"unknown key '{key}'; {hint_for_unknown(key, command)}")
    if sets and key not in own and members and value[:1] not in ("{", "$"):
        raise ConfigError(f"{word}: holds several keys; set one of them, such as {members[0]}=...")
    if sets and key in own and own[key].type == "group":
        check_option(key, value, word)


def check_option(group: str, value: object, given: str) -> None:
    """Refuse what names neither one option nor code of yours: a number, a list, a reference or null."""
    if isinstance(value, str) and re.fullmatch(r"(?!(?:null|true|false|\d+)\Z)[\w./:-]+", value):
        return
    if isinstance(value, str) and "," in value and value[0] not in "[{$":
        raise ConfigError(f"{given}: several values need -m (a sweep)")
    hint = or_list("", [option.name for option in list_options(group)])
    if group == "balance" and str(value).startswith("["):
        hint = f"balance=manual 'balance.layers={str(value).replace(' ', '')}'"
    raise ConfigError(f"{given}: choose an option by its name; {hint}")
