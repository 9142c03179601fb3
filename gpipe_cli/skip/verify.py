"""Proves before a model runs that each skip is stashed by one layer and popped by one not before it.

Skippable modules are seen wherever they are nested. Within one layer of the sequence the order in which
nested modules run cannot be known here; a pop that comes too early there is an error when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from gpipe_cli.skip.name import SkipName
from gpipe_cli.skip.skippable import named_skippables


def verify_skippables(module: nn.Module) -> None:
    """Raise TypeError, listing what does not match, unless the skips of a sequence's layers are in pairs."""
    stashed: set[SkipName] = set()
    popped: set[SkipName] = set()
    problems: list[str] = []
    for name, layer in module.named_children():
        problems += _layer_problems(name, layer, stashed, popped)
    problems += [
        f"no module declared '{skip.name}' as poppable but stashed" for skip in sorted(stashed - popped)
    ]
    if problems:
        listed = "\n".join(f"* {problem}" for problem in problems)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{listed}")


def _layer_problems(
    name: str, layer: nn.Module, stashed: set[SkipName], popped: set[SkipName]
) -> Iterator[str]:
    """What is wrong with a layer, if those before it did what the sets hold; adds what this one does."""
    nested = list(named_skippables(layer, name))
    for path, module in nested:
        for name_of_both in sorted(module.stashable_names & module.poppable_names):
            yield f"'{path}' declared '{name_of_both}' both as stashable and as poppable"
        yield from _redeclared(path, "stashable", module.stashable(), stashed)
    for path, module in nested:
        for skip in module.poppable():
            if skip not in stashed:
                yield f"'{path}' declared '{skip.name}' as poppable but it was not stashed"
        yield from _redeclared(path, "poppable", module.poppable(), popped)


def _redeclared(path: str, word: str, skips: Iterable[SkipName], declared: set[SkipName]) -> Iterator[str]:
    for skip in skips:
        if skip in declared:
            yield f"'{path}' redeclared '{skip.name}' as {word} but not isolated by namespace"
        declared.add(skip)
