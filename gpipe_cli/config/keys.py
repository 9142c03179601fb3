"""The options that ship with gpipe: the YAML files of each group under conf/, and those under recipes/.

Imports neither Hydra nor torch, so that help, listing and completion stay quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpipe_cli.config.schema import COMPONENT_GROUPS, GROUPS, NO_EFFECT, SCHEMAS, SWEPT, config_keys
from gpipe_cli.config.words import SCALE_KEY, override_key, sets_hydra
from gpipe_cli.errors import ConfigError, did_you_mean, or_list


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
    def facts(self) -> dict[str, str]:
        """The pairs of a comment such as `# facts: parameters=11181642 layers=10`."""
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if line.startswith("# facts:"):
                return dict(pair.split("=", 1) for pair in line.removeprefix("# facts:").split())
        return {}


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

    The words choose before the model, which picks matching data, and the model before a recipe.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    recipe = given.get("recipe", given.get("recipes"))
    listed = [option for option in list_options("recipes") if option.name == recipe]
    chosen = dict(re.findall(r"^  - (?:override /)?(\w+): (\w+)$", _primary(command), flags=re.MULTILINE))
    chosen |= {key: name for option in listed for key, name in option.picks.items()}
    models = {option.name: option for option in list_options("model")}
    model = models.get(given.get("model") or chosen.get("model", ""))
    chosen |= {} if model is None else model.picks
    chosen |= {group: name for group, name in given.items() if group in chosen}
    return {
        group: option
        for group, name in chosen.items()
        for option in list_options(group)
        if option.name == name
        and group not in NO_EFFECT.get(command, ())
        and f"{group}._target_" not in given
    }


@cache
def known_keys(command: str) -> tuple[str, ...]:
    """Every key that the command has: those of its schema, and those of the shipped options of its groups."""
    own = [key.key for key in config_keys(command)]
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
