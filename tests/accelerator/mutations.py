"""Finds every synchronization in the package, and removes one at a time from the running program.

    python -m tests.accelerator.mutations [FILE ...]

removes those of the files, or all, runs the tests marked `accelerator` on simulated devices without each, and prints
the test that failed. A synchronization that no test misses is either useless or not tested.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import gpipe_cli
from tests.accelerator import simulator
from tests.accelerator.marked import PYTEST_OPTIONS, marked_files

PACKAGE = Path(gpipe_cli.__file__).parent
TORCH_CALLS = {"wait_stream", "wait_event", "record_event", "record_stream", "synchronize"}
OWN_CALLS = {
    *("wait_for_copies", "wait_for_event", "keep_alive", "finish_queued", "_wait"),
    *("finish_copies", "wait_until_stored", "_worker.wait", "_worker.finish", "worker.finish"),
}
"""Functions and methods of gpipe_cli that wait or keep memory with those of torch."""

NOT_SEEN = {
    (
        "check/children.py",
        "torch.accelerator.synchronize(device)",
    ): "runs under torch's sanitizer, on real CUDA",
    (
        "offload/prefetcher.py",
        "self.finish_copies()",
    ): "bounds memory, which the simulated allocator frees at once",
}
"""Calls that no simulated device can miss, and why."""


@dataclass(frozen=True)
class Mutation:
    """One call that is left out."""

    file: str
    line: int
    column: int
    source: str
    function: str
    """The qualified name of the function or method that contains the call."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.source}"


def all_mutations() -> list[Mutation]:
    found = [mutation for path in sorted(PACKAGE.rglob("*.py")) for mutation in _mutations_of(path)]
    return [mutation for mutation in found if (mutation.file, mutation.source) not in NOT_SEEN]


def _mutations_of(path: Path) -> Iterator[Mutation]:

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[Mutation]:
        for child in ast.iter_child_nodes(node):
            if _is_synchronization(child) and names:
                file = path.relative_to(PACKAGE).as_posix()
                # Code of an inner function is part of the outer one's.
                function = ".".join(names)
                yield Mutation(file, child.lineno, child.col_offset, ast.unparse(child), function)
            inner = isinstance(child, ast.ClassDef) or (
                isinstance(child, ast.FunctionDef) and not isinstance(node, ast.FunctionDef)
            )
            yield from visit(child, (*names, child.name) if inner else names)

    yield from visit(ast.parse(path.read_text()), ())


def _is_synchronization(node: ast.AST) -> bool:
    match node:
        case ast.Call(ast.Attribute(_, name) | ast.Name(name)) if name in TORCH_CALLS | OWN_CALLS:
            return True
        case ast.Call(ast.Attribute(ast.Attribute(_, owner) | ast.Name(owner), name)):
            return f"{owner}.{name}" in OWN_CALLS
    return False


class _LeaveOut(ast.NodeTransformer):
    def __init__(self, mutation: Mutation) -> None:
        self._place = mutation.line, mutation.column, mutation.source
        self.found = False

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if (node.lineno, node.col_offset, ast.unparse(node)) == self._place:
            self.found = True
            return ast.copy_location(ast.Constant(None), node)
        self.generic_visit(node)
        return node


@contextlib.contextmanager
def left_out(mutation: Mutation) -> Iterator[None]:
    """The program runs without the call; where its value is used, with None."""
    path = PACKAGE / mutation.file
    leave_out = _LeaveOut(mutation)
    tree = ast.fix_missing_locations(leave_out.visit(ast.parse(path.read_text())))
    assert leave_out.found, f"{path} has changed"
    function = _function(mutation)
    original = function.__code__
    function.__code__ = _code(compile(tree, str(path), "exec"), mutation.function.split("."))
    try:
        yield
    finally:
        function.__code__ = original


def _function(mutation: Mutation) -> Any:
    name = mutation.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found: Any = importlib.import_module(f"gpipe_cli.{name}")
    for part in mutation.function.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    if isinstance(found, functools._lru_cache_wrapper):
        found.cache_clear()
    return inspect.unwrap(found)


def _code(code: CodeType, names: list[str]) -> CodeType:
    for name in names:
        code = next(part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name)
    return code


class _FirstFailure:
    """A pytest plugin."""

    def __init__(self) -> None:
        self.test: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.test is None:
            self.test = report.nodeid


def test_that_fails(mutation: Mutation) -> str | None:
    """The first marked test that fails without the call, in files that test the same folder first."""
    folder = mutation.file.split("/")[0]
    files = sorted(marked_files(), key=lambda path: (path.parent.name != folder, str(path)))
    failure = _FirstFailure()
    options = [*PYTEST_OPTIONS, "-x", "-m", "accelerator and not slow", "--no-header"]
    with left_out(mutation), contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*options, *map(str, files)], plugins=[failure])
    return failure.test


def main(files: list[str]) -> int:
    simulator.load("cuda")
    missed = 0
    for mutation in all_mutations():
        if not files or mutation.file in files:
            test = test_that_fails(mutation)
            missed += test is None
            sys.stdout.write(f"{mutation}: {test or 'NOT FOUND'}\n")
            sys.stdout.flush()
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
