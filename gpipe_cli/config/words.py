"""A command line, and its words that set keys: `key=value`, `+key=value`, `~key`, `group=option`, `recipe=name`.

Imports nothing expensive: help and completion read words too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import final

from gpipe_cli.config.schema import COMPONENT_GROUPS, SCHEMAS
from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.report.formatting import hidden_character, no_hidden
from gpipe_cli.values import STRUCTURE, escape_references, quoted

SMALL = "small"
SCALES = ("full", SMALL)
SCALE_KEY = "recipe.scale"
_RECIPE, _SCALE = "recipe=", f"{SCALE_KEY}="
CUSTOM = "custom"
"""The empty option of a component group, whose `_target_` is given instead."""
TEXT_KEYS = ("prompt",)
"""Keys whose value is any text: nothing in it is a list, a sweep, a reference or a quote."""
ANY_CHARACTER = (*TEXT_KEYS, "data.delimiter")
"""Keys whose value may contain line breaks, tabs and invisible characters."""
SHIPPED = ("gpipe_cli", "torch", "torchvision")
"""Packages of which each group accepts some names, and only those, whatever the command line names."""
_CODE = re.compile(r"([A-Za-z_][\w.]*|[\w./-]+\.py):([A-Za-z_]\w*(?:\.\w+)*)")
"""`mypkg.nets:build` or `./nets.py:build`"""
_REFERENCE = re.compile(r"\$\{[^}]*\}")
_HYDRA_READS = re.compile(r"(?:\\.|[\w/\-+.$%*@?|:\\ \t])*", re.ASCII)


@final
@dataclass(frozen=True)
class Request:
    """One parsed command line, or a job of a sweep that it asks for.

    words: those that set keys, or the arguments of a command without a configuration.
    search: the words after --help, which say what to show of it. typed: everything after the command.
    """

    command: str
    words: tuple[str, ...] = ()
    search: str = ""
    typed: tuple[str, ...] = field(default=(), compare=False)
    help: bool = False
    version: bool = False
    json: bool = False
    dry_run: bool = False
    debug: bool = False
    multirun: bool = False
    hydra_help: bool = False
    resolve: bool = False
    cfg: str | None = None
    info: str | None = None
    package: str | None = None
    config_dir: str | None = None
    config_name: str | None = None

    @property
    def line(self) -> str:
        """The command line of the only job, as a user would type it."""
        flags = {"--config-dir": self.config_dir, "--config-name": self.config_name}
        given = [part for flag, value in flags.items() if value is not None for part in (flag, value)]
        return shlex.join(["gpipe", self.command, *self.words, *given])

    @property
    def continues_run(self) -> bool:
        """Whether the components may be those of an earlier run, with keys that the default options do not list."""
        return SCHEMAS[self.command].uses_trained_weights or any(
            override_key(word) == "resume" for word in self.words
        )


def override_key(word: str) -> str:
    """The key or group that an override sets: `optimizer.lr` for `+optimizer.lr=1` and for `~optimizer.lr`."""
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def override_group(word: str) -> str:
    """The first part of the key: `optimizer` for `optimizer.lr=1` and for `optimizer=sgd`."""
    return override_key(word).partition(".")[0]


def sets_key(overrides: Iterable[str], key: str) -> bool:
    """Whether an override sets the key, or a key below it."""
    return any(f"{override_key(word)}.".startswith(f"{key}.") for word in overrides)


def sets_hydra(word: str) -> bool:
    """Whether it configures Hydra: `hydra.sweep.dir=x`, `hydra/launcher=joblib`, `+model@hydra.job=x`."""
    key, _, package = word.lstrip("+~").partition("=")[0].partition("@")
    return any(re.split(r"[./@:]", name)[0] == "hydra" for name in (key, package.removeprefix("_global_.")))


def check_characters(words: Iterable[str]) -> None:
    """Refuse invisible characters, which nobody typed on purpose."""
    for word in words:
        if override_key(word) not in ANY_CHARACTER and (hidden := hidden_character(word)):
            raise ConfigError(f"{override_key(word)}: {no_hidden(hidden)}")


def check_given_once(words: Iterable[str]) -> None:
    """Refuse a key with two values: one of them would have no effect. `~key +key=value` replaces a key."""
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        before = given.setdefault(override_key(word), value) if equals and word[0] != "~" else value
        if before != value:
            raise ConfigError(f"{key}: given as {before} and as {value}; give it once")


def without_keys(overrides: Iterable[str], keys: Collection[str]) -> tuple[str, ...]:
    return tuple(word for word in overrides if override_key(word) not in keys)


def to_hydra(words: Sequence[str], *, open_groups: Collection[str] = ()) -> list[str]:
    """The words of one job as Hydra takes them.

    open_groups: component groups that take keys which their option does not list.
    """
    words = _recipe_as_option([quote_override(_target_word(word)) for word in words])
    custom = {
        override_group(word)
        for word in words
        if override_key(word) in {f"{g}._target_" for g in COMPONENT_GROUPS}
    }
    for group in custom:
        if option := next((word for word in words if override_key(word) == group), None):
            raise ConfigError(f"{option} and {group}._target_ exclude each other; give one of them")
    prepared = [f"{group}={CUSTOM}" for group in sorted(custom)]
    for word in words:
        group, key = override_group(word), override_key(word)
        if group in custom and word[0] == "~":
            continue  # the empty option has no key to remove
        # A component's own keys need not be listed in its YAML, so there `+key` also sets a key that is listed.
        is_open = word[0] == "+" or group in custom or group in open_groups
        is_own = group in COMPONENT_GROUPS and key != group and word[0] != "~"
        prepared.append(f"++{word.lstrip('+')}" if is_own and is_open else word)
    return prepared


def named_packages(words: Iterable[str]) -> list[str]:
    """The packages of the code that the command line names by `model=mypkg.nets:build`, and thereby allows."""
    given = (word.partition("=") for word in words if override_key(word) in COMPONENT_GROUPS)
    packages = (str(_target(value) or "").partition(".")[0] for _, _, value in given)
    return [package for package in packages if package and package not in SHIPPED]


def _target_word(word: str) -> str:
    """`model._target_=mypkg.nets.build` for `model=mypkg.nets:build` and for `model=./mypkg/nets.py:build`."""
    key, _, value = word.partition("=")
    target = _target(value) if key in COMPONENT_GROUPS else None
    return word if target is None else f"{key}._target_={target}"


def _target(value: str) -> str | None:
    match = _CODE.fullmatch(value)
    if match is None:
        return None
    module, name = match.groups()
    if not module.endswith(".py"):
        return f"{module}.{name}"
    path = PurePosixPath(module.removeprefix("./")).with_suffix("")
    if path.is_absolute() or not all(part.isidentifier() for part in path.parts):
        raise ConfigError(
            f"{value}: give a file below the current folder, such as ./nets.py:{name}, or its module"
        )
    return ".".join((*path.parts, name))


def _recipe_as_option(words: Sequence[str]) -> list[str]:
    """Turn `recipe=x recipe.scale=small` into `recipes=small/x`, an option of the Hydra group `recipes`.

    The folder is called recipes, and so is Hydra's group. A recipe of another scale is a file of the same name in a
    folder named after the scale.
    """
    scale = next((word.removeprefix(_SCALE) for word in words if word.startswith(_SCALE)), None)
    if scale is not None and scale not in SCALES:
        raise ConfigError(f"{_SCALE}{scale}: {or_list(scale, SCALES)}")
    if scale is not None and not any(word.startswith(_RECIPE) for word in words):
        raise ConfigError(
            f"{_SCALE}{scale}: needs a recipe, and none is given; gpipe train recipe=unet_speed {_SCALE}{SMALL}"
        )
    folder = f"{SMALL}/" if scale == SMALL else ""
    return [
        f"recipes={folder}{word.removeprefix(_RECIPE)}" if word.startswith(_RECIPE) else word
        for word in words
        if not word.startswith(_SCALE)
    ]


def quote_override(word: str) -> str:
    """Quote a value that Hydra's grammar has no characters for: run_dir=日本, data.path=/mnt/R&D.

    Outside quotes Hydra takes ASCII letters, digits and a few other characters. A value with brackets or commas may
    be a list, a mapping, a function or a sweep, so it stays as it is.
    """
    key, equals, value = word.partition("=")
    if equals and key in TEXT_KEYS:
        return f"{key}={quoted(escape_references(value))}"
    plain = _REFERENCE.sub("", value)
    if not equals or _HYDRA_READS.fullmatch(plain) or STRUCTURE.search(plain):
        return word
    return f"{key}={quoted(value)}"
