"""Which skips cross from which partition to which. Taken from what layers declare; nothing is run.

Skips within one partition do not appear: they need no transport. Expects what `verify_skippables` let pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import nn

from gpipe_cli.skip.name import SkipName
from gpipe_cli.skip.skippable import Skippable, named_skippables


@final
class SkipRoute(NamedTuple):
    """A skip that leaves its partition, with the partition at the other end."""

    name: SkipName
    partition: int


@final
@dataclass(frozen=True, slots=True)
class SkipLayout:
    """For each partition the skips it sends and receives, ordered by name."""

    sends: tuple[tuple[SkipRoute, ...], ...]
    receives: tuple[tuple[SkipRoute, ...], ...]


def skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """The routes of all skips that one partition stashes and another pops."""
    sources = _places(partitions, Skippable.stashable)
    destinations = _places(partitions, Skippable.poppable)
    return SkipLayout(
        sends=_routes(sources, destinations, len(partitions)),
        receives=_routes(destinations, sources, len(partitions)),
    )


def _places(
    partitions: Sequence[nn.Module], names_of: Callable[[Skippable], Iterable[SkipName]]
) -> dict[SkipName, int]:
    return {
        name: index
        for index, partition in enumerate(partitions)
        for _, module in named_skippables(partition)
        for name in names_of(module)
    }


def _routes(
    here: dict[SkipName, int], there: dict[SkipName, int], count: int
) -> tuple[tuple[SkipRoute, ...], ...]:
    crossing = sorted(name for name in here if name in there and here[name] != there[name])
    return tuple(
        tuple(SkipRoute(name, there[name]) for name in crossing if here[name] == index)
        for index in range(count)
    )
