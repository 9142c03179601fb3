"""How the micro-batches of a mini-batch are handed to torch's schedules: in flushes.

A torch schedule takes micro-batches of one size only, and not every number of them:

- 1f1b wants as many as there are partitions; with fewer there is nothing to alternate, so gpipe does the same.
- the interleaved ones, zero bubble among them, deal m micro-batches in max(1, m // ranks) rounds of one size.

So a mini-batch becomes runs of equal sizes, and a run that does not deal evenly gives its rest a flush of its own. Each
flush drains the pipeline; the order in which gradients add up stays the order of the micro-batches. Pure Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import final

__all__ = ["Flush", "flushes"]


@final
@dataclass(frozen=True, slots=True)
class Flush:
    schedule: str
    first: int
    """The micro-batch it begins with."""
    count: int


def flushes(sizes: Sequence[int], schedule: str, ranks: int) -> Iterator[Flush]:
    """Those of a mini-batch whose micro-batches have these sizes."""
    first = 0
    for _, run in groupby(sizes):
        left = len(list(run))
        while left:
            count = _most(schedule, left, ranks)
            used = "gpipe" if schedule == "1f1b" and count < ranks else schedule
            yield Flush(used, first, count)
            first, left = first + count, left - count


def _most(schedule: str, count: int, ranks: int) -> int:
    """As many of `count` micro-batches as the schedule takes at once."""
    if schedule in ("gpipe", "1f1b"):
        return count
    return count - count % max(1, count // ranks)
