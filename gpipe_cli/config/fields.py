"""The keys of a command with type, default and meaning, read from the source of `schema`.

Python keeps no docstring under a field, so the file's syntax tree is read; that is cheap enough for
`gpipe --help` and leaves one place to write a key and its sentence.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpipe_cli.config.schema import SCHEMAS


@dataclass(frozen=True)
class Field:
    key: str
    type: str
    default: str
    meaning: str


@cache
def _classes() -> dict[str, ast.ClassDef]:
    tree = ast.parse((Path(__file__).parent / "schema.py").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def fields(command: str) -> list[Field]:
    """Every key of the command, nested ones with their dotted path; those a class has by two ways come once."""
    return list({one.key: one for one in _of_class(SCHEMAS[command].__name__, prefix="")}.values())


def _of_class(name: str, prefix: str) -> list[Field]:
    node = _classes()[name]
    found = [one for base in node.bases for one in _of_class(ast.unparse(base), prefix)]
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or item.value is None:
            continue
        key, kind = prefix + ast.unparse(item.target), ast.unparse(item.annotation)
        if kind in _classes():
            found += _of_class(kind, f"{key}.")
        else:
            found.append(Field(key, _type(kind), _default(item.value), _docstring(following)))
    return found


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _type(annotation: str) -> str:
    return {"dict[str, Any]": "group", "Any": "", "list[str]": "list"}.get(
        annotation, annotation.replace(" | None", "")
    )


def _default(node: ast.expr) -> str:
    if not isinstance(node, ast.Constant):
        return ""
    value = node.value
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
