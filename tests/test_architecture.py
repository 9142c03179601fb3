"""docs/architecture.md mentions only files, classes and functions that exist, and every folder of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TOP = Path(__file__).parent.parent
PACKAGE = TOP / "gpipe_cli"
PAGE = (TOP / "docs" / "architecture.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"`([^`\n]+)`", PAGE)
FILES = {text for text in QUOTED if re.fullmatch(r"[\w/]+(\.py|/)", text)}
ROWS = re.findall(r"^\| `([\w/]+\.py)` \| (`.+?`) \|", PAGE, flags=re.MULTILINE)
CLASSES = {name for text in QUOTED for name in re.findall(r"\b[A-Z]\w*[a-z]\w*", text)}


def definitions(path: Path) -> set[str]:
    """Every class, function, method (`Class.method`) and constant at the top level of a file."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef(name=name, body=body):
                methods = {member.name for member in body if isinstance(member, ast.FunctionDef)}
                names |= {name} | {f"{name}.{method}" for method in methods}
            case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
    return names


def test_every_file_and_folder_that_the_page_mentions_exists() -> None:
    assert len(FILES) > 50
    assert [name for name in FILES if not (PACKAGE / name).exists() and not (TOP / name).exists()] == []


def test_every_file_defines_the_functions_that_its_row_names() -> None:
    assert len(ROWS) > 20
    for file, names in ROWS:
        assert set(re.findall(r"`([^`]+)`", names)) <= definitions(PACKAGE / file), file


def test_every_class_that_the_page_mentions_is_defined_in_the_package() -> None:
    defined = set().union(*(definitions(path) for path in PACKAGE.rglob("*.py")))
    assert "GPipe" in CLASSES and defined >= CLASSES


def test_every_folder_of_the_package_is_on_the_map() -> None:
    assert {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")} <= FILES
