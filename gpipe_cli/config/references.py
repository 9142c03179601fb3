"""Bounds what references such as `${model.width}` may expand to, before OmegaConf resolves them.

Twenty lines that each refer to the next one twice are a million evaluations: the same attack as a YAML alias bomb,
and OmegaConf has no limit for it. A reference whose target cannot be read off its text is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, final

from gpipe_cli.errors import ConfigError

__all__ = ["check_references"]

MOST_CHARACTERS = 100_000
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_NESTED = "\0"  # stands for a reference inside another; no YAML file can hold it


def check_references(plain: Any) -> None:
    """Refuse an unresolved tree whose references would expand without bounds."""
    expansion, total = _Expansion(plain), 0
    for path, text in _strings(plain, ()):
        total = _bounded(total + (expansion.size(path, text) if "${" in text else 0))


@final
class _Expansion:
    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._sizes: dict[tuple[str, ...], int | None] = {}  # None: being computed

    def size(self, path: tuple[str, ...], text: str) -> int:
        """Characters of the text and of all that its references stand for."""
        if path in self._sizes:
            known = self._sizes[path]
            if known is None:
                raise ConfigError(f"{'.'.join(path)}: refers to itself")
            return known
        self._sizes[path] = None
        total = 1 + len(text)
        for target in _targets(path, text):
            for below, value in _strings(self._at(path, target), target):
                total = _bounded(total + self.size(below, value))
        self._sizes[path] = total
        return total

    def _at(self, path: tuple[str, ...], target: tuple[str, ...]) -> Any:
        """What the target names; nothing where there is no such key, which OmegaConf reports."""
        node = self._tree
        for part in target:
            if isinstance(node, str) and "${" in node:
                raise ConfigError(
                    f"{'.'.join(path)}: refers to {'.'.join(target)} through another reference; name its end"
                )
            node = _children(node).get(part)
        return node


def _bounded(characters: int) -> int:
    if characters > MOST_CHARACTERS:
        raise ConfigError(f"configuration: its references expand to more than {MOST_CHARACTERS:,} characters")
    return characters


def _targets(path: tuple[str, ...], text: str) -> Iterator[tuple[str, ...]]:
    """The keys that the references in a text name."""
    while found := _INNERMOST.search(text):
        text = f"{text[: found.start()]}{_NESTED}{text[found.end() :]}"
        inside = found[1].strip()
        resolver, colon, arguments = inside.partition(":")
        if not colon and _NESTED in inside:
            raise ConfigError(f"{'.'.join(path)}: a reference inside the name of another; write the name out")
        # oc.select and its like take keys as arguments.
        names = [inside] if not colon else arguments.split(",") if resolver.startswith("oc.") else []
        for name in names:
            yield _absolute(path, re.sub(r"\[([^\]]*)\]", r".\1", name.strip(" '\"")))


def _absolute(path: tuple[str, ...], name: str) -> tuple[str, ...]:
    """A name that begins with dots is relative: one for a key beside this one, two for one beside its parent."""
    bare = name.lstrip(".")
    dots = len(name) - len(bare)
    base = path[: max(0, len(path) - dots)] if dots else ()
    return (*base, *(part for part in bare.split(".") if part))


def _strings(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text at or below the node, with its path."""
    if isinstance(node, str):
        yield path, node
    for key, value in _children(node).items():
        yield from _strings(value, (*path, key))


def _children(node: Any) -> dict[str, Any]:
    if isinstance(node, dict):
        return {str(key): value for key, value in node.items()}
    return {str(index): value for index, value in enumerate(node)} if isinstance(node, list) else {}
