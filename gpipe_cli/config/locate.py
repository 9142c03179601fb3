"""Where conf/ and recipes/ are: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@cache
def home() -> Path:
    """The folder that holds both conf/ and recipes/."""
    package = Path(__file__).resolve().parent.parent
    return package if (package / "conf").is_dir() else package.parent


def conf_dir() -> Path:
    return home() / "conf"


@dataclass(frozen=True)
class Option:
    """One YAML file of a group."""

    name: str
    path: Path

    @property
    def description(self) -> str:
        """Its first comment line."""
        first = self.path.read_text(encoding="utf-8").partition("\n")[0]
        return first.removeprefix("#").strip() if first.startswith("#") else ""

    @property
    def keys(self) -> list[str]:
        """Its top-level keys."""
        return re.findall(r"^(\w+):", self.path.read_text(encoding="utf-8"), flags=re.MULTILINE)

    @property
    def facts(self) -> dict[str, str]:
        """What a line such as `# facts: parameters=11181642 layers=10` states."""
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if line.startswith("# facts:"):
                return dict(pair.split("=", 1) for pair in line.removeprefix("# facts:").split())
        return {}


def options(group: str) -> list[Option]:
    """The shipped options of a group, by name; `recipes` is one too."""
    folder = home() / "recipes" if group == "recipes" else conf_dir() / group
    return [Option(path.stem, path) for path in sorted(folder.glob("*.yaml"))]
