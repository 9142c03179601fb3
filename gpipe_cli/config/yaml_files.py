"""Reads YAML files that may be hostile: regular files only; bounded size, nesting, aliases and `${...}` references.

Every YAML file that gpipe reads goes through here: shipped options, recipes, --config-dir, config=FILE and a run's
config.yaml.
The limits are far above any real configuration, and low enough that OmegaConf, which is slow, needs a few seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, final

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.errors import ConfigError
from gpipe_cli.safe_files import UnsafeFile, read_regular

MOST_BYTES = 128 * 1024
MOST_NODES = 5_000
DEEPEST = 32
LONGEST_NUMBER = 64
MOST_CHARACTERS = 100_000
_NUMBER = re.compile(r"[-+]?\.?\d[\w.:+-]*")
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_NESTED = "\0"  # stands for a reference inside another; no YAML file can hold it
_Events = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser where PyYAML was built with it


def load_yaml(path: Path, *, base: Path | None = None) -> DictConfig | ListConfig:
    """base: the run directory that the file belongs to; FileNotFoundError where it has none."""
    return parse_yaml(read_config_text(path, base=base), str(path))


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


@dataclass
class _Node:
    """A collection while it is read: how many values it holds and how deep, aliases replaced."""

    anchor: str | None = None
    values: int = 1
    height: int = 1

    def add(self, child: _Node) -> None:
        self.values += child.values
        self.height = max(self.height, child.height + 1)


def _check_limits(text: str, name: str) -> None:
    """Measure the text as it will be once every alias is replaced by what it stands for."""
    open_nodes, anchored = [_Node()], dict[str | None, _Node]()
    for event in yaml.parse(text, Loader=_Events):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append(_Node(event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent | yaml.ScalarEvent | yaml.AliasEvent):
            if isinstance(event, yaml.AliasEvent):
                if any(node.anchor == event.anchor for node in open_nodes):
                    raise ConfigError(f"{name}:{line}: *{event.anchor} contains itself")
                node = anchored.get(event.anchor, _Node())
            else:
                node = _Node(event.anchor) if isinstance(event, yaml.ScalarEvent) else open_nodes.pop()
                anchored[node.anchor] = node
            open_nodes[-1].add(node)
            if isinstance(event, yaml.ScalarEvent) and _is_long_number(event):
                raise ConfigError(
                    f"{name}:{line}: a number of {len(event.value)} digits; no setting takes one"
                )
        if len(open_nodes) + open_nodes[-1].height > DEEPEST + 2:  # the document and its scalars
            raise ConfigError(
                f"{name}:{line}: is nested more than {DEEPEST} levels deep, its aliases replaced"
            )
        if open_nodes[-1].values > MOST_NODES:
            raise ConfigError(f"{name}:{line}: holds more than {MOST_NODES:,} values, its aliases replaced")


def _is_long_number(event: yaml.ScalarEvent) -> bool:
    return (
        len(event.value) > LONGEST_NUMBER
        and (event.implicit[0] or event.tag is not None)
        and _NUMBER.fullmatch(event.value) is not None
    )


def check_references(plain: Any) -> None:
    """Refuse an unresolved tree whose references would expand without bounds."""
    expansion, total = _Expansion(plain), 0
    for path, text in _strings(plain, ()):
        total = _bounded(total + (expansion.size(path, text) if "${" in text else 0))


@final
class _Expansion:
    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._sizes: dict[tuple[str, ...], int | None] = {}  # None: being computed

    def size(self, path: tuple[str, ...], text: str) -> int:
        """Characters of the text and of all that its references stand for."""
        if path in self._sizes:
            known = self._sizes[path]
            if known is None:
                raise ConfigError(f"{'.'.join(path)}: refers to itself")
            return known
        self._sizes[path] = None
        total = 1 + len(text)
        for target in _targets(path, text):
            for below, value in _strings(self._at(path, target), target):
                total = _bounded(total + self.size(below, value))
        self._sizes[path] = total
        return total

    def _at(self, path: tuple[str, ...], target: tuple[str, ...]) -> Any:
        """What the target names; nothing where there is no such key, which OmegaConf reports."""
        node = self._tree
        for part in target:
            if isinstance(node, str) and "${" in node:
                raise ConfigError(
                    f"{'.'.join(path)}: refers to {'.'.join(target)} through another reference; name its end"
                )
            node = _children(node).get(part)
        return node


def _bounded(characters: int) -> int:
    if characters > MOST_CHARACTERS:
        raise ConfigError(f"configuration: its references expand to more than {MOST_CHARACTERS:,} characters")
    return characters


def _targets(path: tuple[str, ...], text: str) -> Iterator[tuple[str, ...]]:
    """The keys that the references in a text name."""
    while match := _INNERMOST.search(text):
        text = f"{text[: match.start()]}{_NESTED}{text[match.end() :]}"
        inside = match[1].strip()
        resolver, colon, arguments = inside.partition(":")
        if not colon and _NESTED in inside:
            raise ConfigError(f"{'.'.join(path)}: a reference inside the name of another; write the name out")
        # oc.select and its like take keys as arguments.
        names = [inside] if not colon else arguments.split(",") if resolver.startswith("oc.") else []
        for name in names:
            yield _absolute(path, re.sub(r"\[([^\]]*)\]", r".\1", name.strip(" '\"")))


def _absolute(path: tuple[str, ...], name: str) -> tuple[str, ...]:
    """A name that begins with dots is relative: one for a key beside this one, two for one beside its parent."""
    bare = name.lstrip(".")
    dots = len(name) - len(bare)
    base = path[: max(0, len(path) - dots)] if dots else ()
    return (*base, *(part for part in bare.split(".") if part))


def _strings(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text at or below the node, with its path."""
    if isinstance(node, str):
        yield path, node
    for key, value in _children(node).items():
        yield from _strings(value, (*path, key))


def _children(node: Any) -> dict[str, Any]:
    if isinstance(node, dict):
        return {str(key): value for key, value in node.items()}
    return {str(index): value for index, value in enumerate(node)} if isinstance(node, list) else {}
