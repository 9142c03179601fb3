"""Which borders become cuts: enough to balance any number of partitions, and cheap ones.

Cuts are where the fewest tensors cross: one, in most models. A long stretch without such a border (a dense
block, a U of skips) is cut near its middle, where the fewest bytes cross, until none is long. Between two
modules there is at most one cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import attrgetter

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.by_tracing.borders import Border

__all__ = ["choose_cuts"]

_LONG = 24  # uses of modules: two residual blocks of the larger kind
_QUARTERS = 4  # in a small model, what is more than a quarter of it is long


def choose_cuts(borders: Sequence[Border], holders: int) -> list[Border]:
    """The cuts in order; `holders` is how many steps of the model use modules or tensors of it."""
    inner = [border for border in borders if 0 < border.holders < holders]
    legal = [border for border in inner if border.obstacle is None]
    if inner and not legal:
        obstacles = ", ".join(sorted({border.obstacle for border in inner if border.obstacle})[:3])
        raise ConfigError(
            f"the model cannot be cut anywhere: {obstacles}; hand over nothing but tensors and sizes between its "
            "modules, or give model.layers"
        )
    fewest = min((border.tensors for border in legal), default=0)
    narrow = [border for border in legal if border.tensors == fewest]
    # The latest of the cheapest: a function stays with the module before it.
    cuts = [
        min(reversed([*run]), key=attrgetter("bytes")) for _, run in groupby(narrow, attrgetter("holders"))
    ]
    longest = min(_LONG, max(1, holders // _QUARTERS))
    for start, stop in pairwise([0, *(cut.holders for cut in cuts), holders]):
        cuts = [*cuts, *_halved(start, stop, legal, longest)]
    return sorted(cuts, key=attrgetter("places"))


def _halved(start: int, stop: int, legal: Sequence[Border], longest: int) -> list[Border]:
    """Cuts after `start` and before `stop` holders, until no stretch of them is long."""
    length = stop - start
    if length <= longest:
        return []
    central = [border for border in legal if length <= 4 * (border.holders - start) <= 3 * length]
    if not central:
        return []
    best = min(central, key=lambda border: (border.bytes, abs(2 * border.holders - start - stop)))
    halves = (start, best.holders), (best.holders, stop)
    return [best, *(cut for half in halves for cut in _halved(*half, legal, longest))]
