"""What the package never does, and how large its pieces may grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpipe_cli

PACKAGE = Path(gpipe_cli.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen"}
UNSAFE_ARGUMENTS = {("shell", True), ("weights_only", False), ("allow_pickle", True)}
HOMELESS = {"utils", "helpers", "common", "misc"}

each_file = pytest.mark.parametrize("path", FILES, ids=NAMES)


def imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module, names):
            return [f"{module}.{alias.name}" for alias in names]
    return []


def dotted(node: ast.AST) -> str:
    """`torch.nn.Module` for the expression that reads so, nothing for any other."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{before}.{name}" if (before := dotted(value)) else ""
    return ""


def unsafe(node: ast.AST) -> Iterator[str]:
    yield from (f"imports {name}" for name in imported(node) if name.split(".")[0] in UNSAFE_MODULES)
    match node:
        case ast.Call(function, _, keywords):
            if dotted(function) in UNSAFE_CALLS:
                yield f"calls {dotted(function)}"
            for keyword in keywords:
                match keyword:
                    case ast.keyword(name, ast.Constant(value)) if (name, value) in UNSAFE_ARGUMENTS:
                        yield f"passes {name}={value}"
        case ast.ExceptHandler(None):
            yield "catches everything with a bare except"


def private_torch(node: ast.AST) -> Iterator[str]:
    for name in [*imported(node), dotted(node)]:
        first, *parts = name.split(".")
        private = [part for part in parts if part.startswith("_") and not part.endswith("__")]
        if first == "torch" and private:
            yield f"uses {name}"


def findings(path: Path, look: object) -> list[str]:
    assert callable(look)
    tree = ast.parse(path.read_text())
    return [f"line {getattr(node, 'lineno', 0)} {found}" for node in ast.walk(tree) for found in look(node)]


@each_file
def test_nothing_unsafe_is_done(path: Path) -> None:
    assert findings(path, unsafe) == []


@each_file
def test_private_names_of_torch_stay_in_their_room(path: Path) -> None:
    if path.parent != PACKAGE / "torch_internals":
        assert findings(path, private_torch) == []


@each_file
def test_a_file_says_what_it_decides_is_under_400_lines_and_has_a_telling_name(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "a module docstring is missing"
    assert len(text.splitlines()) < 400
    assert path.stem not in HOMELESS


@each_file
def test_functions_are_under_60_lines(path: Path) -> None:
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = [node.name for node in functions if (node.end_lineno or 0) - node.lineno >= 60]
    assert long == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle", "line 1 imports pickle"),
        ("from pickle import loads", "line 1 imports pickle.loads"),
        ("eval('1')", "line 1 calls eval"),
        ("run('ls', shell=True)", "line 1 passes shell=True"),
        ("load(path, weights_only=False)", "line 1 passes weights_only=False"),
        ("load(path, allow_pickle=True)", "line 1 passes allow_pickle=True"),
        ("try:\n    pass\nexcept:\n    pass", "line 3 catches everything with a bare except"),
    ],
)
def test_the_search_finds_what_it_looks_for(source: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "guilty.py"
    path.write_text(source)
    assert findings(path, unsafe) == [expected]


@pytest.mark.parametrize(
    "source", ["import torch._C", "from torch.nn.modules.batchnorm import _BatchNorm", "x = torch._C._len"]
)
def test_the_search_finds_private_names_of_torch(source: str, tmp_path: Path) -> None:
    path = tmp_path / "guilty.py"
    path.write_text(source)
    assert findings(path, private_torch)


def test_the_search_lets_a_model_be_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "innocent.py"
    path.write_text("model.eval()\ntorch.__version__")
    assert findings(path, unsafe) + findings(path, private_torch) == []
