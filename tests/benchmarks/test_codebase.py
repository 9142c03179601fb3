from __future__ import annotations

from pathlib import Path

from benchmarks.codebase import comments, import_depth_and_cycles, preamble_lines, read_package

TOP = '''"""Docstring
of two lines."""

from package.middle import helper  # both lines count

__all__ = ["run"]


def run() -> None:
    # A comment of its own.
    helper()  # noqa: X
'''


def test_a_small_package_is_counted_by_hand(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "top.py").write_text(TOP)
    (package / "middle.py").write_text("from package import bottom\n\nhelper = bottom.x\n")
    (package / "bottom.py").write_text("def x() -> None:\n    from package import top\n\n    top.run()\n")
    modules = {module.name: module for module in read_package(package)}
    assert preamble_lines(modules["package.top"]) == 4
    assert comments(modules["package.top"]) == 2
    # An import inside a function runs later: it closes no cycle.
    assert import_depth_and_cycles(list(modules.values())) == (3, 0)
    (package / "bottom.py").write_text("import package.top\n\n\ndef x() -> None: ...\n")
    assert import_depth_and_cycles(read_package(package)) == (1, 1)
