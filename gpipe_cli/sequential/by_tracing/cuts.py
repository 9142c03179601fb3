"""Which borders become cuts: enough to balance any number of partitions, and cheap ones.

Cuts are where the fewest tensors cross: one, in most models. A stretch between two such cuts (a dense block, a
U of skips) is cut again where the fewest cross within it, until none is long. Between two modules there is at
most one cut, where the fewest bytes cross.
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
            f"the model cannot be cut anywhere: {obstacles}; let only tensors and sizes cross, or give model.layers"
        )
    longest = min(_LONG, max(1, holders // _QUARTERS))
    return sorted(_cuts_between(0, holders, legal, longest), key=attrgetter("places"))


def _cuts_between(start: int, stop: int, legal: Sequence[Border], longest: int) -> list[Border]:
    """Cuts after `start` and before `stop` holders."""
    inside = [border for border in legal if start < border.holders < stop]
    fewest = min((border.tensors for border in inside), default=0)
    narrow = [border for border in inside if border.tensors == fewest]
    # The latest of the cheapest: a function stays with the module before it.
    cuts = [
        min(reversed([*run]), key=attrgetter("bytes")) for _, run in groupby(narrow, attrgetter("holders"))
    ]
    for before, after in pairwise([start, *(cut.holders for cut in cuts), stop]):
        if cuts and after - before > longest:
            cuts = [*cuts, *_cuts_between(before, after, inside, longest)]
    return cuts
