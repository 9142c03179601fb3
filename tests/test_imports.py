"""Imports go down only: every import of the package must follow the table below.

Imports inside functions and under TYPE_CHECKING count too: the rule is about what a module knows, not about when it
is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.package_source import trees

LEVELS = """
    __main__
    cli
    completion sweep
    help
    jobs
    commands
    runs check
    inference
    runs.saved
    build plan
    arguments
    config
    launch
    runs.directory
    runs.snapshots
    training report
    engines
    offload distributed
    balance
    profiling
    pipeline
    tensor_files
    sequential
    skip
    schedule accelerator torch_internals huggingface config.schema plan.device_table
    vision runs.reader
    values pytree safe_files process_lifetime activity
    errors lazy_attributes __version__
"""
"""Top to bottom. An area imports from itself and from lower lines; areas on one line do not import each other, but for
build and plan: building a run may need a search for its order, and a search measures what it builds."""

COMPONENTS = {
    "models": {
        "tensor_files",
        "sequential",
        "skip",
        "huggingface",
        "vision",
        "values",
        "safe_files",
        "errors",
    },
    "data": {"huggingface", "vision", "values", "pytree", "safe_files", "errors", "process_lifetime"},
    "losses": {"values", "errors"},
    "loggers": {"values", "safe_files", "errors"},
}
"""Areas beside the levels, and what they import; reached from BUILDERS and by `_target_` in a config."""

BUILDERS = {"build", "runs", "runs.saved", "inference"}
"""The areas that reach the components."""
ONLY_IN = {
    "hydra": {"config", "sweep"},
    "omegaconf": {"config", "sweep", "build", "runs", "inference"},
    "torchvision": {"vision"},
    "transformers": {"huggingface"},
}
"""Packages that only these modules import; others use `from gpipe_cli.vision import torchvision` and the like."""

WITHOUT_TORCH = {
    "runs.snapshots.durable",
    "runs.snapshots.manifest",
    "schedule",
    "plan.costs",
    "plan.device_table",
    "plan.list_schedule",
    "plan.order_plans",
    "plan.order_problem",
    "plan.order_search",
    "plan.search",
    "plan.step_time",
    "launch.rank",
    "balance.solver",
    "config.schema",
    "safe_files",
    "runs.reader",
    "errors",
    "process_lifetime",
    "activity",
}

LEVEL_OF = {area: level for level, line in enumerate(LEVELS.split("\n")) for area in line.split()}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported} (line {self.line})"


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name within it, except the package's own __init__."""
    dotted = {
        ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__"): tree
        for name, tree in trees().items()
    }
    return {name: tree for name, tree in dotted.items() if name != "__init__"}


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


def within(name: str, areas: set[str]) -> str | None:
    """The innermost of the areas that contain a module."""
    containing = [area for area in areas if f"{name}.".startswith(f"{area}.")]
    return max(containing, key=len, default=None)


def area_of(name: str) -> str:
    area = within(name, LEVEL_OF.keys() | COMPONENTS.keys())
    assert area is not None, f"'{name}' has no place in the table of tests/test_imports.py"
    return area


def is_allowed(importer: str, imported: str) -> bool:
    source, target = area_of(importer), area_of(imported)
    if source == target or {source, target} == {"build", "plan"}:
        return True
    if source in COMPONENTS:
        return target in COMPONENTS[source]
    if target in COMPONENTS:
        return source in BUILDERS
    return LEVEL_OF[source] < LEVEL_OF[target]


@cache
def all_imports() -> list[Import]:
    return [each for name, tree in modules().items() for each in imports(name, tree)]


def test_every_module_has_a_place_in_the_table() -> None:
    assert {area_of(name) for name in modules()} <= LEVEL_OF.keys() | COMPONENTS.keys()


def imports_of(package: str) -> list[Import]:
    return [each for each in all_imports() if each.imported.split(".")[0] == package]


def test_no_import_goes_up_or_sideways() -> None:
    wrong = [
        each
        for each in imports_of("gpipe_cli")
        if not is_allowed(each.importer, each.imported.partition(".")[2])
    ]
    assert not wrong, "; ".join(map(str, wrong))


@pytest.mark.parametrize("package", ONLY_IN)
def test_some_packages_are_imported_in_few_areas_only(package: str) -> None:
    wrong = [each for each in imports_of(package) if within(each.importer, ONLY_IN[package]) is None]
    assert not wrong, "; ".join(map(str, wrong))


def test_modules_that_must_load_fast_do_not_import_torch() -> None:
    wrong = [each for each in imports_of("torch") if within(each.importer, WITHOUT_TORCH) is not None]
    assert not wrong, "; ".join(map(str, wrong))


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("pipeline.gpipe", "schedule.order_check", True),
        ("schedule.order_check", "pipeline.gpipe", False),
        ("schedule.orders", "schedule.action", True),
        ("training.loop", "report.tables", False),
        ("config.compose", "config.schema", True),
        ("config.schema", "config.compose", False),
        ("models.resnet", "sequential", True),
        ("models.resnet", "pipeline.gpipe", False),
        ("engines.single", "models.resnet", False),
    ],
)
def test_the_rule_distinguishes_down_from_up(importer: str, imported: str, allowed: bool) -> None:
    assert is_allowed(importer, imported) == allowed


def loaded_by(name: str) -> set[str]:
    """The modules of the package that importing one loads: what is imported in functions or for types alone is not."""
    known, loaded = modules(), set[str]()
    waiting = [name]
    while waiting:
        parts = waiting.pop().split(".")
        for each in (".".join(parts[: count + 1]) for count in range(len(parts))):
            if each in known and each not in loaded:
                loaded.add(each)
                body = [node for node in known[each].body if isinstance(node, ast.Import | ast.ImportFrom)]
                found = imports(each, ast.Module(body, []))
                waiting += filter(None, (imported.imported.partition(".")[2] for imported in found))
    return loaded


def test_a_training_run_loads_neither_the_planner_nor_the_check_nor_the_page_nor_the_tracer_beforehand() -> (
    None
):
    loaded = loaded_by("commands.train")
    late = {"plan", "check", "report.page", "sequential.tracing", "launch.launcher"}
    assert not [name for name in loaded if within(name, late) is not None]
    assert len(loaded) <= 180, "import what a run may not need where it is needed"
