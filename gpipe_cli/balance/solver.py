"""The exact solver: consecutive layers into partitions so that the costliest partition is as cheap as possible.

Pure Python on numbers; knows nothing of torch or of what a cost stands for. What a partition costs is told by an
`Objective`: the sum of its layers' costs, or anything that grows with every layer added at its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Protocol, final


@final
@dataclass(frozen=True)
class Solution:
    balance: list[int]
    largest: float
    """The cost of the costliest partition: no balance has a smaller one."""


class Objective(Protocol):
    """What a partition costs, by its place among the partitions and its layers from `begin` up to `end`."""

    @property
    def layers(self) -> int: ...

    @property
    def grows_backwards(self) -> bool:
        """Whether a layer added in front adds to the cost as well: then it is best to begin as late as possible."""

    def cost(self, partition: int, begin: int, end: int) -> float: ...

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        """The last end that costs at most `limit` and is allowed; `begin` if there is none."""


@final
class Additive:
    """The sum of the layers' costs, whichever partition it is."""

    grows_backwards = True

    def __init__(self, costs: Sequence[float]) -> None:
        if any(not 0 <= cost < inf for cost in costs):
            raise ValueError("costs must be finite and not negative")
        self.layers = len(costs)
        self._prefix = [0, *accumulate(costs)]

    def cost(self, partition: int, begin: int, end: int) -> float:
        return self._prefix[end] - self._prefix[begin]

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        prefix = self._prefix
        end = max(begin, bisect_right(prefix, prefix[begin] + limit, begin) - 1)
        # prefix[begin] + limit is rounded; what counts is the difference.
        while end > begin and prefix[end] - prefix[begin] > limit:
            end -= 1
        while end < self.layers and prefix[end + 1] - prefix[begin] <= limit:
            end += 1
        return end


@final
class ByPlace:
    """Sums of costs that depend on which partition a layer is in."""

    grows_backwards = True

    def __init__(self, places: Sequence[Additive]) -> None:
        self.layers = places[0].layers
        self._places = places

    def cost(self, partition: int, begin: int, end: int) -> float:
        return self._places[partition].cost(partition, begin, end)

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        return self._places[partition].furthest(partition, begin, limit)


@final
@dataclass(frozen=True)
class _Probe:
    """An attempt to stay below a limit."""

    ends: list[int] | None
    """Where the partitions end; None if it cannot be done."""
    value: float
    """The largest cost realised; without success the smallest limit that would change the attempt."""


def require_layers(layers: int, partitions: int) -> None:
    """Refuse what no balance can be found for."""
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer (partitions: {partitions})")
    if layers < partitions:
        raise ValueError(
            f"there are fewer layers than partitions (layers: {layers}, partitions: {partitions})"
        )


def sums(objective: Objective, balance: Sequence[int]) -> list[float]:
    """What each partition of a balance costs."""
    borders = pairwise([0, *accumulate(balance)])
    return [objective.cost(partition, begin, end) for partition, (begin, end) in enumerate(borders)]


def solve(costs: Sequence[float], partitions: int) -> Solution:
    """The best balance for costs that add up."""
    solution = minimise(Additive(costs), partitions)
    assert solution is not None, "without another limit every number of partitions is possible"
    return solution


def minimise(objective: Objective, partitions: int) -> Solution | None:
    """The best balance, or None if the objective allows none.

    Bisects the limit. Every probe moves a bound to a cost that some partition really has, so a few suffice.
    """
    require_layers(objective.layers, partitions)
    low, best = 0.0, _probe(objective, partitions, inf)
    if best.ends is None:
        return None
    while low < best.value:
        middle = (low + best.value) / 2
        # Between neighbouring numbers the middle is rounded to one of them; only the lower one tells anything new.
        probe = _probe(objective, partitions, middle if middle < best.value else low)
        if probe.ends is None:
            low = probe.value
        else:
            best = probe
    assert best.ends is not None
    return Solution([end - begin for begin, end in pairwise([0, *best.ends])], best.value)


def _probe(objective: Objective, partitions: int, limit: float) -> _Probe:
    """From every place a partition can begin at, see how far it gets; the ones after it need a layer each."""
    origins: list[dict[int, int]] = []  # of each partition: where it may end, and where it then began
    begins: Iterable[int] = [0]
    smallest_overflow = inf
    for partition in range(partitions):
        last_end = objective.layers - (partitions - 1 - partition)
        reached: dict[int, int] = {}
        beyond = 0
        for begin in begins:
            end = min(last_end, objective.furthest(partition, begin, limit))
            if end < last_end:
                overflow = objective.cost(partition, begin, end + 1)
                # One that costs little enough is forbidden for another reason, which no limit changes.
                smallest_overflow = min(smallest_overflow, overflow if overflow > limit else inf)
            # Begins ascend, so up to where an earlier one got there is nothing new.
            new = range(max(begin, beyond) + 1, end + 1)
            reached.update(dict.fromkeys(new[-1:] if objective.grows_backwards else new, begin))
            beyond = max(beyond, end)
        if not reached:
            return _Probe(None, smallest_overflow)
        origins.append(reached)
        begins = reached
    return _trace(objective, origins, smallest_overflow)


def _trace(objective: Objective, origins: Sequence[dict[int, int]], smallest_overflow: float) -> _Probe:
    """Walk back from the last layer to the first."""
    end, ends, largest = objective.layers, [], 0.0
    if end not in origins[-1]:
        return _Probe(None, smallest_overflow)
    for partition in reversed(range(len(origins))):
        begin = origins[partition][end]
        largest = max(largest, objective.cost(partition, begin, end))
        ends.append(end)
        end = begin
    return _Probe(ends[::-1], largest)
