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
        """Its first comment line; one that begins with @ is for Hydra."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        comments = (line.lstrip("# ") for line in lines if line.startswith("#"))
        return next((comment for comment in comments if not comment.startswith("@")), "")

    @property
    def keys(self) -> dict[str, tuple[str, str]]:
        """Its top-level keys with default and meaning, the comment behind each."""
        text = self.path.read_text(encoding="utf-8")
        found = re.findall(r"^(\w+): *(.*?)(?: +# (.*))?$", text, flags=re.MULTILINE)
        return {
            key: (default, meaning) for key, default, meaning in found if key not in ("_target_", "defaults")
        }

    @property
    def target(self) -> str | None:
        """The component it describes, if it describes one."""
        found = re.search(r"^_target_: *([\w.]+)", self.path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        return None if found is None else found[1]

    @property
    def facts(self) -> dict[str, str]:
        """What a line such as `# facts: parameters=11181642 layers=10` states."""
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if line.startswith("# facts:"):
                return dict(pair.split("=", 1) for pair in line.removeprefix("# facts:").split())
        return {}


def options(group: str) -> list[Option]:
    """The shipped options of a group, by name; `recipes` is one too, and `recipes/small` those of that scale."""
    folder = home() / group if group.partition("/")[0] == "recipes" else conf_dir() / group
    return [Option(path.stem, path) for path in sorted(folder.glob("*.yaml"))]


def takes_recipes(command: str) -> bool:
    return "  - recipes: null\n" in _primary(command)


def default_options(command: str) -> dict[str, Option]:
    """The option each group has when nothing is said, as the command's primary config lists them."""
    text = _primary(command)
    chosen = dict(re.findall(r"^  - (\w+): (\w+)$", text, flags=re.MULTILINE))
    return {
        group: option for group, name in chosen.items() for option in options(group) if option.name == name
    }


def _primary(command: str) -> str:
    return (conf_dir() / f"{command}.yaml").read_text(encoding="utf-8")
