"""Which borders become cuts: enough to balance any number of partitions, and cheap ones.

Between two modules there is at most one cut, where the fewest bytes cross. Where a single tensor crosses
there always is one. A stretch without such a border (a dense block, an attention with many inputs) is cut
only if it is long, where the fewest bytes cross near its middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import attrgetter

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.by_tracing.borders import Border

__all__ = ["choose_cuts"]

_LONG = 24  # uses of modules: two residual blocks of the larger kind


def choose_cuts(borders: Sequence[Border], holders: int) -> list[Border]:
    """The cuts in order; `holders` is how many steps of the model use modules or tensors of it."""
    inner = [border for border in borders if 0 < border.holders < holders]
    legal = [border for border in inner if border.obstacle is None]
    if inner and not legal:
        obstacles = ", ".join(sorted({border.obstacle for border in inner if border.obstacle})[:3])
        raise ConfigError(
            f"the model cannot be cut anywhere: {obstacles}; let only tensors and sizes cross, or give model.layers"
        )
    single = [border for border in legal if border.tensors == 1]
    # The latest of the cheapest: a function stays with the module before it.
    cuts = [
        min(reversed(list(run)), key=attrgetter("bytes")) for _, run in groupby(single, attrgetter("holders"))
    ]
    ends = [0, *(cut.holders for cut in cuts), holders]
    for start, stop in pairwise(ends):
        cuts += _split(legal, start, stop)
    return sorted(cuts, key=attrgetter("places"))


def _split(legal: Sequence[Border], start: int, stop: int) -> list[Border]:
    """Cuts between two numbers of holders, until no stretch is long."""
    length = stop - start
    if length <= _LONG:
        return []
    central = [border for border in legal if length <= 4 * (border.holders - start) <= 3 * length]
    if not central:
        return []
    best = min(central, key=lambda border: (border.bytes, abs(2 * border.holders - start - stop)))
    return [*_split(legal, start, best.holders), best, *_split(legal, best.holders, stop)]
