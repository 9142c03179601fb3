"""Imports go down only: the table below is the rule, and every import of the package is held to it.

Imports inside functions and under TYPE_CHECKING count too: the direction is about knowledge, not about time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import gpipe_cli

PACKAGE = Path(gpipe_cli.__file__).parent

LEVELS = """
    __main__
    cli
    completion
    help
    commands
    run
    arguments
    config
    launch
    plan training report
    engines
    offload distributed
    balance
    profiling
    pipeline
    sequential
    skip
    schedule accelerator torch_internals vision config.schema
    values safe_files owned_folder
    errors version byte_size orphans collector redaction
"""
"""Top to bottom. A room imports from itself and from lines below its own, so those of one line never meet."""

ASIDE = {
    "models": {"sequential", "skip", "vision", "values", "safe_files", "errors"},
    "data": {"vision", "values", "safe_files", "errors", "orphans"},
    "losses": {"values", "errors"},
    "loggers": {"safe_files", "errors"},
}
"""Rooms beside the levels, and what they import; reached from `run` and by `_target_` in a config."""

ONLY_IN = {
    "hydra": {"config.composing", "config.load", "config.printing"},
    "omegaconf": {
        "config.composing",
        "config.environment",
        "config.load",
        "config.yaml_files",
        "commands",
        "run",
    },
    "torchvision": {"vision"},
}
"""Packages that only these know; the others say `from gpipe_cli.vision import torchvision`."""

WITHOUT_TORCH = {
    "training.snapshot.durable",
    "training.snapshot.header",
    "training.snapshot.manifest",
    "training.snapshot.discovery",
    "schedule",
    "balance.solver",
    "config.schema",
    "safe_files",
    "errors",
    "version",
    "byte_size",
    "orphans",
    "owned_folder",
    "collector",
    "redaction",
}

LEVEL_OF = {room: level for level, line in enumerate(LEVELS.split("\n")) for room in line.split()}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported} (line {self.line})"


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name within it, the package's own face excepted."""
    paths = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
    names = {path: ".".join(parts).removesuffix(".__init__") for path, parts in paths.items()}
    return {name: ast.parse(path.read_text()) for path, name in names.items() if name != "__init__"}


def imports(importer: str, tree: ast.Module) -> Iterator[Import]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                targets = [alias.name for alias in names]
            case ast.ImportFrom(module, names, level):
                assert level == 0, f"{importer} imports by a relative path (line {node.lineno})"
                targets = [f"{module}.{alias.name}" for alias in names]
            case _:
                continue
        yield from (Import(importer, target, node.lineno) for target in targets)


def within(name: str, rooms: set[str]) -> str | None:
    """The most exact of the rooms a module is in."""
    found = [room for room in rooms if f"{name}.".startswith(f"{room}.")]
    return max(found, key=len, default=None)


def room_of(name: str) -> str:
    room = within(name, LEVEL_OF.keys() | ASIDE.keys())
    assert room is not None, f"'{name}' has no place in the table of tests/test_imports.py"
    return room


def is_allowed(importer: str, imported: str) -> bool:
    here, there = room_of(importer), room_of(imported)
    if here == there:
        return True
    if here in ASIDE:
        return there in ASIDE[here]
    if there in ASIDE:
        return here == "run"
    return LEVEL_OF[here] < LEVEL_OF[there]


MODULES = modules()
IMPORTS = [one for name, tree in MODULES.items() for one in imports(name, tree)]
INTERNAL = [one for one in IMPORTS if one.imported.split(".")[0] == "gpipe_cli"]


def test_every_module_has_a_place_in_the_table() -> None:
    assert {room_of(name) for name in MODULES} <= LEVEL_OF.keys() | ASIDE.keys()


def test_no_import_goes_up_or_sideways() -> None:
    wrong = [one for one in INTERNAL if not is_allowed(one.importer, one.imported.partition(".")[2])]
    assert not wrong, "; ".join(map(str, wrong))


@pytest.mark.parametrize("package", ONLY_IN)
def test_some_packages_are_known_in_few_rooms_only(package: str) -> None:
    of_package = [one for one in IMPORTS if one.imported.split(".")[0] == package]
    wrong = [one for one in of_package if within(one.importer, ONLY_IN[package]) is None]
    assert not wrong, "; ".join(map(str, wrong))


def test_what_must_start_fast_or_run_anywhere_does_without_torch() -> None:
    of_torch = [one for one in IMPORTS if one.imported.split(".")[0] == "torch"]
    wrong = [one for one in of_torch if within(one.importer, WITHOUT_TORCH) is not None]
    assert not wrong, "; ".join(map(str, wrong))


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("pipeline.gpipe", "schedule.check", True),
        ("schedule.check", "pipeline.gpipe", False),
        ("schedule.gpipe", "schedule.action", True),
        ("training.loop", "report.tables", False),
        ("config.load", "config.schema", True),
        ("config.schema", "config.load", False),
        ("models.resnet", "sequential", True),
        ("models.resnet", "pipeline.gpipe", False),
        ("engines.single", "models.resnet", False),
    ],
)
def test_the_rule_itself_tells_down_from_up(importer: str, imported: str, allowed: bool) -> None:
    assert is_allowed(importer, imported) == allowed
