"""The options that ship with gpipe: the YAML files of each group under conf/, and those under recipes/.

Imports neither Hydra nor torch, so that help, listing and completion stay quick.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpipe_cli.config.overrides import SCALE_KEY
from gpipe_cli.config.schema import GROUPS, NO_EFFECT, config_keys


@cache
def resources_dir() -> Path:
    """The folder that holds conf/ and recipes/: the installed package, or the root of a checkout."""
    package = Path(__file__).resolve().parent.parent
    return package if (package / "conf").is_dir() else package.parent


def conf_dir() -> Path:
    return resources_dir() / "conf"


@dataclass(frozen=True)
class Option:
    """One YAML file of a group."""

    name: str
    path: Path

    @property
    def description(self) -> str:
        """The first comment line of the file; lines that begin with @ are for Hydra."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        comments = (line.lstrip("# ") for line in lines if line.startswith("#"))
        return next((comment for comment in comments if not comment.startswith("@")), "")

    @property
    def keys(self) -> dict[str, tuple[str, str]]:
        """Each key with its default and its meaning, which is the comment on its line; `lora.rank` is nested."""
        keys: dict[str, tuple[str, str]] = {}
        path: list[str] = []
        text = self.path.read_text(encoding="utf-8")
        for indent, key, default, meaning in re.findall(
            r"^((?:  )*)(\w+): *(.*?)(?: *# (.*))?$", text, flags=re.MULTILINE
        ):
            path = [*path[: len(indent) // 2], key]
            keys.pop(".".join(path[:-1]), None)  # it has no value of its own
            if path[0] not in ("_target_", "defaults"):
                keys[".".join(path)] = (default, meaning)
        return keys

    @property
    def target(self) -> str | None:
        """The `_target_` of the file, if it has one."""
        match = re.search(r"^_target_: *([\w.]+)", self.path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        return None if match is None else match[1]

    @property
    def facts(self) -> dict[str, str]:
        """The pairs of a comment such as `# facts: parameters=11181642 layers=10`."""
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if line.startswith("# facts:"):
                return dict(pair.split("=", 1) for pair in line.removeprefix("# facts:").split())
        return {}


def list_options(group: str) -> list[Option]:
    """The shipped options of a group, sorted by name; `recipes` and `recipes/small` are groups too."""
    folder = resources_dir() / group if group.partition("/")[0] == "recipes" else conf_dir() / group
    return [Option(path.stem, path) for path in sorted(folder.glob("*.yaml"))]


def takes_recipes(command: str) -> bool:
    return "  - recipes: null\n" in _primary(command)


def default_options(command: str) -> dict[str, Option]:
    """The default option of each group that the command uses, as the command's primary config lists them."""
    text = _primary(command)
    chosen = dict(re.findall(r"^  - (\w+): (\w+)$", text, flags=re.MULTILINE))
    return {
        group: option
        for group, name in chosen.items()
        for option in list_options(group)
        if option.name == name and group not in NO_EFFECT.get(command, ())
    }


def known_keys(command: str) -> list[str]:
    """Every key that exists: those of the schema and those of the shipped options of each group."""
    inside = [f"{group}.{key}" for group in GROUPS for option in list_options(group) for key in option.keys]
    of_recipes = [SCALE_KEY] if takes_recipes(command) else []
    return [*(key.key for key in config_keys(command)), *dict.fromkeys(inside), *of_recipes]


def _primary(command: str) -> str:
    return (conf_dir() / f"{command}.yaml").read_text(encoding="utf-8")
