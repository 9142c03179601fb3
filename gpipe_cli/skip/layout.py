"""Which skips cross from which partition to which, derived from what the layers declare.

Skips within a partition do not appear: they need no transport. Run `verify_skippables` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import nn

from gpipe_cli.skip.namespace import SkipName
from gpipe_cli.skip.skippable import named_skippables


@final
class SkipRoute(NamedTuple):
    """A skip that leaves its partition, and the partition at the other end."""

    name: SkipName
    partition: int


@final
@dataclass(frozen=True, slots=True)
class SkipLayout:
    """For each partition the skips it sends and receives, ordered by name."""

    sends: tuple[tuple[SkipRoute, ...], ...]
    receives: tuple[tuple[SkipRoute, ...], ...]


def skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """Return the routes of all skips that one partition stashes and another pops."""
    stashed_in: dict[SkipName, int] = {}
    popped_in: dict[SkipName, int] = {}
    for index, partition in enumerate(partitions):
        for _, module in named_skippables(partition):
            stashed_in.update(dict.fromkeys(module.stashable(), index))
            popped_in.update(dict.fromkeys(module.poppable(), index))
    return SkipLayout(
        sends=_routes(stashed_in, popped_in, len(partitions)),
        receives=_routes(popped_in, stashed_in, len(partitions)),
    )


def _routes(
    near: dict[SkipName, int], far: dict[SkipName, int], partitions: int
) -> tuple[tuple[SkipRoute, ...], ...]:
    """For each partition at the `near` end its routes to the `far` end."""
    # Sorted: both ends of a boundary must send and receive their skips in the same order.
    crossing = sorted(name for name in near if name in far and near[name] != far[name])
    return tuple(
        tuple(SkipRoute(name, far[name]) for name in crossing if near[name] == index)
        for index in range(partitions)
    )
