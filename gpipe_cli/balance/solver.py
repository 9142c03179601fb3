"""The exact solver: consecutive layers into partitions so that the costliest partition is as cheap as possible.

Pure Python on a list of costs; knows nothing of torch or of what a cost stands for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import final


@final
@dataclass(frozen=True)
class Solution:
    balance: list[int]
    largest: float
    """The cost of the costliest partition: no balance has a smaller one."""


@final
@dataclass(frozen=True)
class _Probe:
    """An attempt to stay below a limit."""

    ends: list[int] | None
    """Where the partitions end; None if it cannot be done."""
    value: float
    """The largest cost realised; without success the smallest limit that would change the attempt."""


def solve(costs: Sequence[float], partitions: int) -> Solution:
    """Bisect the limit. Every probe moves a bound to a cost that some partition really has, so a few suffice."""
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer (partitions: {partitions})")
    if len(costs) < partitions:
        raise ValueError(
            f"there are fewer layers than partitions (layers: {len(costs)}, partitions: {partitions})"
        )
    if any(not 0 <= cost < inf for cost in costs):
        raise ValueError("costs must be finite and not negative")
    prefix = [0, *accumulate(costs)]
    low = max(max(costs), prefix[-1] / partitions)
    best = _probe(prefix, partitions, inf)
    assert best.ends is not None, "without a limit every number of partitions is possible"
    while low < best.value:
        middle = (low + best.value) / 2
        # Between neighbouring numbers the middle is rounded to one of them; only the lower one tells anything new.
        probe = _probe(prefix, partitions, middle if middle < best.value else low)
        if probe.ends is None:
            low = probe.value
        else:
            best = probe
    assert best.ends is not None
    return Solution([end - begin for begin, end in pairwise([0, *best.ends])], best.value)


def _probe(prefix: Sequence[float], partitions: int, limit: float) -> _Probe:
    """Fill each partition as far as the limit allows and the partitions after it still get a layer each."""
    ends: list[int] = []
    begin, largest, smallest_overflow = 0, 0.0, inf
    for after in reversed(range(partitions)):
        furthest = len(prefix) - 1 - after
        end = min(furthest, bisect_right(prefix, prefix[begin] + limit, begin) - 1)
        # prefix[begin] + limit is rounded; what counts is the difference.
        while end > begin and prefix[end] - prefix[begin] > limit:
            end -= 1
        while end < furthest and prefix[end + 1] - prefix[begin] <= limit:
            end += 1
        if end < furthest:
            smallest_overflow = min(smallest_overflow, prefix[end + 1] - prefix[begin])
        if end == begin:
            return _Probe(None, smallest_overflow)
        largest = max(largest, prefix[end] - prefix[begin])
        ends.append(end)
        begin = end
    return _Probe(ends, largest) if begin == len(prefix) - 1 else _Probe(None, smallest_overflow)
