"""The keys of each command with type, default, meaning and heading, as help, completion and the reference show them.

Python keeps no docstring below a field and no comment, so both are read from the text of `schema`. That is cheap enough
for `gpipe --help`, and leaves one place to write a key and its sentence.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpipe_cli.config import schema
from gpipe_cli.config.schema import GROUPS, NO_EFFECT, SCHEMAS

FIRST = "Keys"
"""The heading of the keys that matter most, and of keys that stand below no heading."""


@dataclass(frozen=True)
class ConfigKey:
    """One key of a command, as help and the reference show it."""

    key: str
    type: str
    default: str
    meaning: str
    heading: str = FIRST


def config_keys(command: str) -> list[ConfigKey]:
    """Every key of the command, nested ones by their dotted path."""
    # TrainConfig inherits some keys along two paths; the mapping keeps them once.
    keys = {key.key: key for key in _class_keys(SCHEMAS[command].__name__, prefix="")}
    return [key for key in keys.values() if key.key not in NO_EFFECT.get(command, ())]


@cache
def _source() -> list[str]:
    return Path(schema.__file__).read_text(encoding="utf-8").splitlines()


@cache
def _class_definitions() -> dict[str, ast.ClassDef]:
    tree = ast.parse("\n".join(_source()))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _class_keys(name: str, prefix: str, heading: str = FIRST) -> list[ConfigKey]:
    node = _class_definitions()[name]
    keys = [key for base in node.bases for key in _class_keys(ast.unparse(base), prefix)]
    end = node.lineno
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        headings = re.findall(
            r"^    # \[(.+)\]$", "\n".join(_source()[end : item.lineno]), flags=re.MULTILINE
        )
        heading, end = (headings or [heading])[-1], item.lineno
        if not isinstance(item, ast.AnnAssign) or item.value is None:
            continue
        key, annotation = prefix + ast.unparse(item.target), ast.unparse(item.annotation)
        nested = annotation in _class_definitions()
        type_name = {"dict[str, Any]": "group", "Any": "", "list[str]": "list"}.get(
            annotation, annotation.replace(" | None", "")
        )
        if not nested or key in GROUPS:
            kind = "group" if nested else type_name
            keys.append(ConfigKey(key, kind, _default(item.value), _docstring(following), heading))
        if nested:
            keys += _class_keys(annotation, f"{key}.", heading)
    return keys


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _default(node: ast.expr) -> str:
    """The default as it is written on the command line."""
    if not isinstance(node, ast.Constant):
        return ""
    value = node.value
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
