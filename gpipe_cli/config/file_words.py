"""The keys of a file as the overrides of a command line.

A file says what a command line would: `model: resnet18`, `optimizer.lr: 0.1` or `optimizer: {option: sgd, lr: 0.1}`.
Whatever handles overrides (sweeps, checks, resumed runs) therefore handles files too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, final

from gpipe_cli.config.options import known_keys, list_options
from gpipe_cli.config.overrides import (
    SCALE_KEY,
    TEXT_KEYS,
    escape_references,
    override_key,
    quoted,
)
from gpipe_cli.config.schema import GROUPS, SCHEMAS
from gpipe_cli.errors import ConfigError, did_you_mean, or_list

OPTION = "option"
"""In the mapping of a group, the key that names the option."""
_KEY = re.compile(r"\+?[A-Za-z_][\w-]*(\.[\w-]+)*", re.ASCII)


@final
@dataclass(frozen=True)
class ConfigFile:
    path: str
    words: tuple[str, ...]
    """The overrides that the file stands for, without those that the command line replaces."""
    notes: tuple[str, ...] = ()
    """What the command does not take from the file, in lines for the user."""

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Let an error about one of its keys begin with the name of the file."""
        try:
            yield
        except ConfigError as error:
            if not any(_is_about(str(error), override_key(word)) for word in self.words):
                raise
            raise ConfigError(f"{self.path}: {error}") from error


def file_words(plain: Mapping[Any, Any], command: str) -> tuple[str, ...]:
    """The overrides that the keys of a file stand for."""
    return tuple(_words(_nested(plain), command))


def _nested(plain: Mapping[Any, Any]) -> dict[str, Any]:
    """Put `optimizer.lr: 0.1` where `optimizer: {lr: 0.1}` would be."""
    nested: dict[str, Any] = {}
    for key, value in plain.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(f"{key!r} is not the name of a key")
        name, _, inner = key.removeprefix("+").partition(".")
        if inner:
            inner = f"+{inner}" if key.startswith("+") else inner
            value = {inner: value}
        before = nested.get(name)
        if name in nested and name in (*GROUPS, "recipe"):
            # `model: resnet18` beside `model.num_classes: 5`
            before = before if isinstance(before, dict) else {OPTION: before}
            value = value if isinstance(value, dict) else {OPTION: value}
        if isinstance(before, dict) and isinstance(value, dict):
            if twice := before.keys() & value.keys():
                raise ConfigError(f"{name}.{min(twice, key=str)}: given twice")
            value = {**before, **value}
        elif name in nested:
            raise ConfigError(f"{name}: given twice")
        nested[name] = value
    return nested


def _words(nested: Mapping[str, Any], command: str) -> Iterator[str]:
    for name, value in nested.items():
        _check_name(name, command)
        if name == "recipe":
            yield from _recipe_words(value)
        elif isinstance(value, dict):
            yield from _mapping_words(name, value)
        elif name in GROUPS:
            yield f"{name}={_option(name, value)}"
        elif name in TEXT_KEYS:
            yield f"{name}={quoted(escape_references(str(value)))}"
        else:
            yield f"{name}={_text(name, value)}"


def _check_name(name: str, command: str) -> None:
    if name == "allow":
        raise ConfigError("allow: may only be given on the command line, not in a file; add it there")
    if name == "defaults":
        raise ConfigError(
            "defaults: a file of keys has no list of defaults; choose an option by its group, as in model: resnet18"
        )
    known = {field.name for field in fields(SCHEMAS[command])} | {"recipe"}
    if name in known:
        return
    owners = [other for other, schema in SCHEMAS.items() if name in {field.name for field in fields(schema)}]
    if owners:
        raise ConfigError(
            f"{name}: gpipe {command} does not have this key; it belongs to {', '.join(owners)}"
        )
    hint = (
        did_you_mean(name, [*sorted(known), *known_keys(command)])
        or f"see `gpipe {command} --help` for every key"
    )
    raise ConfigError(f"unknown key '{name}'; {hint}")


def _recipe_words(value: Any) -> Iterator[str]:
    mapping = value if isinstance(value, dict) else {OPTION: value}
    for key, member in mapping.items():
        if key not in (OPTION, "name", "scale"):
            raise ConfigError(f"unknown key 'recipe.{key}'; {or_list(str(key), (OPTION, 'scale'))}")
        yield f"{SCALE_KEY if key == 'scale' else 'recipe'}={_option('recipe', member)}"


def _mapping_words(name: str, mapping: Mapping[Any, Any]) -> Iterator[str]:
    rest = dict(mapping)
    # Some options have a key `name`; it names the option only where nothing else does. That of a schedule is its own.
    key = OPTION if OPTION in rest or "_target_" in rest or name == "schedule" else "name"
    if name in GROUPS and key in rest:
        yield f"{name}={_option(f'{name}.{key}' if key == 'name' else name, rest.pop(key))}"
    for inner, value in rest.items():
        if not isinstance(inner, str) or not _KEY.fullmatch(inner):
            raise ConfigError(f"{name}: {inner!r} is not the name of a key")
        plus = "+" if inner.startswith("+") else ""
        path = f"{name}.{inner.removeprefix('+')}"
        yield f"{plus}{path}={_text(path, value)}"


def _option(key: str, value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)*", value):
        return value
    group = "recipes" if key == "recipe" else key.partition(".")[0]
    cure = or_list("", [option.name for option in list_options(group)])
    if key == "balance" and isinstance(value, list):
        cure = f"balance: {{option: manual, layers: {value}}}"
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    raise ConfigError(f"{key}: {shown}: choose an option by its name; {cure}")


def _text(path: str, value: Any) -> str:
    """A value as Hydra's grammar writes it; text is quoted, so that nothing in it is a sweep."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return quoted(value)
        case list():
            return f"[{','.join(_text(path, member) for member in value)}]"
        case dict():
            for key in value:
                if not isinstance(key, str | int) or not re.fullmatch(r"[\w./-]+", str(key), re.ASCII):
                    raise ConfigError(
                        f"{path}: {key!r} cannot be a key here; use letters, digits, . _ / and -"
                    )
            return "{" + ",".join(f"{key}:{_text(path, member)}" for key, member in value.items()) + "}"
    raise ConfigError(f"{path}: a value of type {type(value).__name__} cannot be used; put it in quotes")


def _is_about(message: str, key: str) -> bool:
    """Whether an error message begins with the key; that of an option is not about the keys below it."""
    end = r"(?![\w.])" if key in GROUPS else r"(?!\w)"
    return re.match(rf"(unknown key ')?\+*{re.escape(key)}{end}", message) is not None
