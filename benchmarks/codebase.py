"""The figures of a package's source: sizes, imports, comments, repeated names, frames from `step` to a layer.

python -m benchmarks.codebase gpipe_cli /path/to/an/older/checkout/gpipe_cli
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import final

FRAMES = """
import sys, threading, torch
from gpipe_cli import GPipe

package, caller = sys.argv[1], threading.get_ident()

def ours(frame):
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(package)
        frame = frame.f_back
    return count

class Probe(torch.nn.Linear):
    def forward(self, input):
        # In a worker: its own frames, and those in which the caller waits for it.
        waiting = 0 if threading.get_ident() == caller else ours(sys._current_frames()[caller])
        counts.append(ours(sys._getframe()) + waiting)
        return super().forward(input)

counts = []
with GPipe(torch.nn.Sequential(Probe(2, 2), Probe(2, 2)), [1, 1], devices=["cpu", "cpu"], chunks=2) as pipe:
    pipe.step(torch.zeros(4, 2), torch.zeros(4, 2), torch.nn.functional.mse_loss)
print(max(counts))
"""
"""Runs in a process of its own, which imports the package that is measured."""


@final
@dataclass(frozen=True)
class Module:
    """One file of the package, by its name within it."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def read_package(package: Path) -> list[Module]:
    modules = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        modules.append(Module(name, path, text, ast.parse(text)))
    return modules


def figures(package: Path) -> dict[str, str]:
    modules = read_package(package)
    lines = sum(module.lines for module in modules)
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    classes = Counter(
        node.name for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
    )
    names = Counter(module.path.name for module in modules if module.path.name != "__init__.py")
    depth, cycles = import_depth_and_cycles(modules)
    return {
        "files / lines": f"{len(modules)} / {lines:,}",
        "file lines: median / p90 / max": spread(module.lines for module in modules),
        "function lines: median / p90 / max": spread(functions),
        "docstring, import and `__all__` lines": f"{sum(map(preamble_lines, modules)) / lines:.1%}",
        "import depth / cycles": f"{depth} / {cycles}",
        "comments per 100 lines": f"{100 * sum(map(comments, modules)) / lines:.1f}",
        "class names used more than once": repeated(classes),
        "file names used more than once": repeated(names),
        "frames from `step` to a layer": str(frames_to_layer(package)),
    }


def spread(sizes: Iterable[int]) -> str:
    ordered = sorted(sizes)
    return f"{median(ordered):g} / {ordered[int(0.9 * len(ordered))]} / {ordered[-1]}"


def repeated(names: Counter[str]) -> str:
    several = sorted(name for name, count in names.items() if count > 1)
    return f"{len(several)}: {', '.join(several)}" if several else "0"


def preamble_lines(module: Module) -> int:
    """Lines of the module docstring, of imports wherever they are, and of `__all__`."""
    lines: set[int] = set()
    if ast.get_docstring(module.tree) is not None:
        lines.update(line_range(module.tree.body[0]))
    for node in ast.walk(module.tree):
        is_all = isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        )
        if is_all or isinstance(node, ast.Import | ast.ImportFrom):
            lines.update(line_range(node))
    return len(lines)


def line_range(node: ast.stmt | ast.AST) -> range:
    assert isinstance(node, ast.stmt)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def comments(module: Module) -> int:
    """Comments on lines of their own and at the ends of others, `noqa` and `type: ignore` alone left out."""
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    texts = (token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)
    return sum(not (text.startswith(("noqa", "type: ignore")) and " - " not in text) for text in texts)


def import_depth_and_cycles(modules: list[Module]) -> tuple[int, int]:
    """The longest chain of imports that run when a module is imported, and how many groups import each other."""
    names = {module.name for module in modules}
    graph = {
        module.name: set(imported(top_level(module.tree.body), names)) - {module.name} for module in modules
    }

    @cache
    def reachable(name: str) -> frozenset[str]:
        reached: set[str] = set()
        waiting = [name]
        while waiting:
            for target in graph[waiting.pop()] - reached:
                reached.add(target)
                waiting.append(target)
        return frozenset(reached)

    groups = {frozenset(other for other in reachable(name) if name in reachable(other)) for name in names}
    cycles = {group for group in groups if group}
    in_cycle = {name for group in cycles for name in group}

    @cache
    def depth(name: str) -> int:
        targets = (target for target in graph[name] if target not in in_cycle)
        return 1 + max(map(depth, targets), default=0)

    return max(depth(name) for name in names - in_cycle), len(cycles)


def imported(nodes: Iterable[ast.AST], names: set[str]) -> Iterator[str]:
    """The modules of the package that these nodes of a module import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in names:
                    yield full
                elif node.module in names:
                    yield node.module


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported."""
    for node in body:
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.dump(node.test):
                yield from top_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from top_level([*node.body, *node.orelse, *node.finalbody])
        else:
            yield node


def frames_to_layer(package: Path) -> int:
    process = subprocess.run(
        [sys.executable, "-c", FRAMES, f"{package}{os.sep}"],
        capture_output=True,
        text=True,
        cwd=package.parent,  # where `python -c` looks for modules first
        check=True,
    )
    return int(process.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the figures of a package's source as a table.")
    parser.add_argument("packages", nargs="*", type=Path, default=[Path("gpipe_cli")], metavar="package")
    packages = [package.resolve() for package in parser.parse_args().packages]
    columns = [figures(package) for package in packages]
    sys.stdout.write(f"| | {' | '.join(str(package.parent) for package in packages)} |\n")
    sys.stdout.write(f"|---|{'---|' * len(packages)}\n")
    for name in columns[0]:
        sys.stdout.write(f"| {name} | {' | '.join(column[name] for column in columns)} |\n")


if __name__ == "__main__":
    main()
