"""The source of the package, for tests that read it: parsed once per process, and only if such a test runs there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import gpipe_cli

PACKAGE = Path(gpipe_cli.__file__).parent


@cache
def sources() -> dict[str, str]:
    """The text of every module by its path within the package."""
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(source) for name, source in sources().items()}
