"""House rules that ruff does not have: private names of torch, types of devices, sizes, names and depth of imports."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import codebase
from benchmarks.codebase import Module
from tests.support.package_source import PACKAGE, sources, trees

VAGUE_NAMES = {"utils", "helpers", "common", "misc"}
DEVICE_TYPES = {"cuda", "hip", "xpu", "mps", "npu", "mtia"}
KNOWS_DEVICE_TYPES = ("accelerator", "torch_internals/dispatch_modes.py")
"""The sanitizer is a private part of torch.cuda, and no other kind of device has one."""
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_IMPORT_DEPTH = 22
SMALL_FILE_LINES = 100
SMALL_FILES_OF_THEIR_OWN = {
    "__main__": "Python names it",
    "completion": "a press of Tab loads it, and nothing else does",
    "torch_internals.order_runtime": "it imports torch.distributed.pipelining, which costs what others need not pay",
}
SAME_JOB = {"protocol.py"}
"""Names of files that do the same job for two things."""

Check = Callable[[ast.AST], Iterator[str]]


def imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module, names):
            return [f"{module}.{alias.name}" for alias in names]
    return []


def dotted(node: ast.AST) -> str:
    """The source of an expression such as `torch.nn.Module`, or "" for any other kind of expression."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{prefix}.{name}" if (prefix := dotted(value)) else ""
    return ""


def unpickling(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.keyword("weights_only" as name, ast.Constant(False)) | ast.keyword(
            "allow_pickle" as name, ast.Constant(True)
        ):
            yield f"passes {name}"


def private_torch(node: ast.AST) -> Iterator[str]:
    for name in [*imported(node), dotted(node)]:
        first, *parts = name.split(".")
        private = [part for part in parts if part.startswith("_") and not part.endswith("__")]
        if first == "torch" and private:
            yield f"uses {name}"


def device_types(node: ast.AST) -> Iterator[str]:
    for name in [*imported(node), dotted(node)]:
        first, second, *_ = [*name.split("."), "", ""]
        if first == "torch" and second in DEVICE_TYPES:
            yield f"uses {name}"
    match node:
        case ast.Attribute(_, name) if name.removeprefix("is_") in DEVICE_TYPES and name.startswith("is_"):
            yield f"asks {name}"
        case ast.Call(ast.Attribute(_, name)) if name in DEVICE_TYPES:
            yield f"calls {name}()"
        case ast.Compare(left, _, others):
            constants = (part for side in (left, *others) for part in ast.walk(side))
            compared = {part.value for part in constants if isinstance(part, ast.Constant)}
            yield from (f"compares with '{name}'" for name in sorted(DEVICE_TYPES & compared))


def problems(tree: ast.Module, check: Check) -> list[str]:
    return [
        f"line {getattr(node, 'lineno', 0)} {problem}" for node in ast.walk(tree) for problem in check(node)
    ]


def problems_by_file(check: Check, *outside: str) -> dict[str, list[str]]:
    """The problems of every file of the package that has any, except those of the files and folders `outside`."""
    return {
        name: problems_of_file
        for name, tree in trees().items()
        if not {name, Path(name).parts[0]} & {*outside} and (problems_of_file := problems(tree, check))
    }


def long_functions(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        lines = (node.end_lineno or 0) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{node.name} has {lines} lines"


def test_no_file_lets_a_loader_unpickle() -> None:
    assert problems_by_file(unpickling) == {}
    assert problems(ast.parse("load(path, weights_only=False)"), unpickling) == ["line 1 passes weights_only"]


def test_only_torch_internals_uses_private_names_of_torch() -> None:
    assert problems_by_file(private_torch, "torch_internals") == {}


def test_only_the_accelerator_folder_knows_types_of_accelerators() -> None:
    assert problems_by_file(device_types, *KNOWS_DEVICE_TYPES) == {}


def test_every_file_has_a_docstring() -> None:
    assert [name for name, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_every_file_name_says_what_is_inside() -> None:
    assert [name for name in sources() if Path(name).stem in VAGUE_NAMES] == []


def test_no_file_has_more_than_600_lines() -> None:
    lines = {name: len(source.splitlines()) for name, source in sources().items()}
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_no_function_has_more_than_60_lines() -> None:
    assert problems_by_file(long_functions) == {}


@pytest.mark.parametrize(
    "source", ["import torch._C", "from torch.nn.modules.batchnorm import _BatchNorm", "x = torch._C._len"]
)
def test_private_names_of_torch_are_recognized(source: str) -> None:
    assert problems(ast.parse(source), private_torch)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Event",
        "torch.cuda.synchronize()",
        "torch.xpu.is_available",
        "tensor.is_cuda",
        "model.cuda()",
        "device.type == 'cuda'",
        "device.type in ('cpu', 'mps')",
    ],
)
def test_code_for_one_type_of_accelerator_is_recognized(source: str) -> None:
    assert problems(ast.parse(source), device_types)


def test_reporting_a_version_of_cuda_is_fine() -> None:
    assert problems(ast.parse("facts = {'cuda': torch.version.cuda}"), device_types) == []


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return codebase.read_package(PACKAGE)


def test_no_class_name_stands_for_two_things(modules: list[Module]) -> None:
    classes = Counter(
        node.name for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_no_two_files_have_one_name_unless_they_do_the_same_job(modules: list[Module]) -> None:
    files = Counter(module.path.name for module in modules)
    assert {name for name, count in files.items() if count > 1} == {"__init__.py", *SAME_JOB}


def test_a_small_file_has_two_importers_or_a_yaml_that_names_it(modules: list[Module]) -> None:
    names = {module.name for module in modules}
    importers = Counter(
        target
        for module in modules
        for target in {*codebase.imported(ast.walk(module.tree), names)} - {module.name}
    )
    options = "".join(path.read_text(encoding="utf-8") for path in (PACKAGE.parent / "conf").rglob("*.yaml"))
    lonely = {
        module.name.partition(".")[2]
        for module in modules
        if module.lines < SMALL_FILE_LINES and importers[module.name] < 2 and f"{module.name}." not in options
    }
    # The name of a command is that of its file, and a package is a file because Python asks for one.
    packages = {module.name.partition(".")[2] for module in modules if module.path.name == "__init__.py"}
    assert {name for name in lonely - packages if not name.startswith("commands.")} == {
        *SMALL_FILES_OF_THEIR_OWN
    }


def test_imports_are_not_deep_and_never_circular(modules: list[Module]) -> None:
    depth, cycles = codebase.import_depth_and_cycles(modules)
    assert depth <= MAX_IMPORT_DEPTH and cycles == 0
