"""Every YAML file that gpipe reads: shipped options, recipes, --config-dir, config=FILE and a run's config.yaml.

Files may be hostile. gpipe reads regular files of bounded size and nesting, without YAML aliases; a file chooses
options of gpipe's own groups and sets keys, and it configures neither Hydra nor what code may run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.config.schema import GROUPS, SCHEMAS
from gpipe_cli.config.targets import MOVED, with_current_names
from gpipe_cli.errors import ConfigError
from gpipe_cli.safe_files import UnsafeFile, read_regular

MOST_BYTES = 64 * 1024
MOST_REFERENCES = 24
"""A reference may name a text with references: if each names three, this many make a text 6,561 times as long."""
DEEPEST = 32
ALLOW_CURE = "may only be given on the command line, not in a file; add it there if you trust the code"
_PACKAGE = re.compile(r"_global_(\.(?!hydra\b|allow\b)\w+)?")
_DEFAULT = re.compile(r"(?:(?:override|optional) +)*/?(?P<group>[\w/]+)(?:@(?P<package>[\w.]+))?")
_OPTION = re.compile(r"[\w.-]+(/[\w.-]+)*")
_Events = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser where PyYAML was built with it


def load_yaml(path: Path, *, base: Path | None = None) -> DictConfig | ListConfig:
    """The content of a file, which names targets as this version does.

    base: the run directory that the file belongs to; FileNotFoundError where it has none.
    """
    text = read_config_text(path, base=base)
    tree = parse_yaml(text, str(path))
    if any(name in text for name in MOVED):  # an earlier version saved it
        tree = OmegaConf.create(with_current_names(OmegaConf.to_container(tree)))
    return tree


def load_mapping(path: Path) -> dict[Any, Any]:
    """The keys and values of a file, with references as text."""
    plain = OmegaConf.to_container(load_yaml(path))
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: its top level must be a mapping of keys")
    return plain


def dump_mapping(plain: dict[str, Any]) -> str:
    """The text of a file that `load_mapping` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def read_config_text(path: Path, *, base: Path | None = None) -> str:
    """The whole file as text; a FIFO, a device or a file that is too large is refused without waiting for it."""
    try:
        return read_regular(path, MOST_BYTES, base=base).decode("utf-8-sig")
    except UnsafeFile as error:
        raise ConfigError(
            f"{path}: {error}; a configuration is a regular file of at most {MOST_BYTES // 1024} KiB"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name, or bytes that are not UTF-8
        if base is not None and isinstance(error, FileNotFoundError):
            raise
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def parse_yaml(text: str, name: str) -> DictConfig | ListConfig:
    """name: of the file, for messages."""
    try:
        _check_limits(text, name)
        return OmegaConf.create(text) if text.strip() else OmegaConf.create({})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        raise ConfigError(f"{name}{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{name}: cannot be read: {shorten(str(error), 200)}") from error
    except RecursionError as error:  # interpolations may be nested too
        raise ConfigError(f"{name}: is nested too deeply") from error


def _check_limits(text: str, name: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Events):
        line = event.start_mark.line + 1
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ConfigError(f"{name}:{line}: is nested more than {DEEPEST} levels deep")
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(
                f"{name}:{line}: *{event.anchor} is a YAML alias; repeat the value, or refer to a key by ${{key}}"
            )


def check_references(plain: Any) -> None:
    """Refuse an unresolved tree with so many references that resolving them could take hours."""
    count = sum(text.count("${") for text in _texts(plain))
    if count > MOST_REFERENCES:
        raise ConfigError(
            f"configuration: has {count} references ${{...}}; gpipe takes at most {MOST_REFERENCES}"
        )


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    members = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for member in members:
        yield from _texts(member)


def check_content(plain: Any, package: str | None, name: str) -> None:
    """Refuse a file that does more than choose options of gpipe's groups and set keys; name: of the file.

    package: where its header puts its keys. What a file may say is listed here, rather than what it may not.
    """
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{name}: its top level must be a mapping of keys")
    if package is not None and not _PACKAGE.fullmatch(package) and package not in ("_group_", *GROUPS):
        raise ConfigError(f"{name}: @package {package}: {_hydra_cure(package)}")
    for key in plain:
        if key == "allow":
            raise ConfigError(f"{name}: allow: {ALLOW_CURE}")
        if not isinstance(key, str) or not key.isidentifier() or key == "hydra":
            raise ConfigError(f"{name}: sets {key_path(plain, key)}: {_hydra_cure(key)}")
    defaults = plain.get("defaults") or []
    for entry in defaults if isinstance(defaults, list) else [defaults]:
        _check_default(entry, name)


def key_path(plain: Mapping[Any, Any], key: Any) -> str:
    """The dotted path to the first value below the key."""
    path, node = str(key), plain[key]
    while isinstance(node, dict) and node:
        inner, node = next(iter(node.items()))
        path = f"{path}.{inner}"
    return path


def _check_default(entry: Any, name: str) -> None:
    if isinstance(entry, str) and entry.removesuffix("_schema") in ("_self_", *SCHEMAS):
        return
    ((key, option),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else ((entry, ""),)
    match = _DEFAULT.fullmatch(key) if isinstance(key, str) else None
    group = "" if match is None else match["group"]
    package = None if match is None else match["package"]
    shown = f"{key}: {option}" if isinstance(entry, dict) else entry
    if group.partition("/")[0] not in (*GROUPS, "recipes") or package not in (None, f"_global_.{group}"):
        raise ConfigError(f"{name}: defaults: {shown}: {_hydra_cure(key)}")
    if option is not None and not (isinstance(option, str) and _OPTION.fullmatch(option or group)):
        raise ConfigError(f"{name}: defaults: {shown}: choose an option by its name")
    if ".." in str(option or ""):
        raise ConfigError(f"{name}: defaults: {shown}: leaves the folder; name an option below it")


def _hydra_cure(key: Any) -> str:
    if re.search(r"\bhydra\b", str(key)):
        return "no file may configure Hydra; give it on the command line"
    return "a file may choose options of gpipe's groups and set keys; remove it"
