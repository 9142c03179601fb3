"""The exact solver: divides consecutive layers into partitions so that the costliest partition is as cheap as possible.

Pure Python on numbers, without torch. An `Objective` says what a partition costs: the sum of its layers' costs, or
anything that grows with every layer added at its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import inf
from typing import Protocol, final

Balance = tuple[int, ...]


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
        """Whether a layer added in front also adds to the cost: then a partition does best to begin late."""

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
        # prefix[begin] + limit is rounded; the difference decides.
        while end > begin and prefix[end] - prefix[begin] > limit:
            end -= 1
        while end < self.layers and prefix[end + 1] - prefix[begin] <= limit:
            end += 1
        return end


@final
class AdditiveByPartition:
    """The sum of the layers' costs, which depend on the partition a layer is in."""

    grows_backwards = True

    def __init__(self, partitions: Sequence[Additive]) -> None:
        self.layers = partitions[0].layers
        self._partitions = partitions

    def cost(self, partition: int, begin: int, end: int) -> float:
        return self._partitions[partition].cost(partition, begin, end)

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        return self._partitions[partition].furthest(partition, begin, limit)


@final
class FrozenStart:
    """Another objective for partitions within the first `frozen_layers`, by which they cost no more."""

    grows_backwards = True

    def __init__(self, frozen: Objective, other: Objective, frozen_layers: int) -> None:
        self.layers = other.layers
        self._frozen, self._other, self._frozen_layers = frozen, other, frozen_layers

    def cost(self, partition: int, begin: int, end: int) -> float:
        objective = self._frozen if end <= self._frozen_layers else self._other
        return objective.cost(partition, begin, end)

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        end = self._other.furthest(partition, begin, limit)
        if end > self._frozen_layers or begin >= self._frozen_layers:
            return end
        return min(self._frozen.furthest(partition, begin, limit), self._frozen_layers)


@final
@dataclass(frozen=True)
class _Probe:
    """An attempt to keep every partition within a limit."""

    ends: list[int] | None
    """Where the partitions end; None if it cannot be done."""
    value: float
    """The largest cost reached; after a failure the smallest limit that would change the attempt."""


def require_layers(layers: int, partitions: int) -> None:
    """Raise ValueError if no balance exists."""
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer (partitions: {partitions})")
    if layers < partitions:
        raise ValueError(
            f"there are fewer layers than partitions (layers: {layers}, partitions: {partitions})"
        )


def sums(objective: Objective, balance: Sequence[int]) -> list[float]:
    """What each partition of a balance costs."""
    ranges = pairwise([0, *accumulate(balance)])
    return [objective.cost(partition, begin, end) for partition, (begin, end) in enumerate(ranges)]


def solve(costs: Sequence[float], partitions: int) -> Solution:
    """The best balance for costs that add up."""
    solution = minimize(Additive(costs), partitions)
    assert solution is not None, "without another limit every number of partitions is possible"
    return solution


def minimize(objective: Objective, partitions: int) -> Solution | None:
    """The best balance, or None if the objective allows none.

    Bisects the limit. Every probe moves a bound to a cost that some partition really has, so a few suffice.
    """
    require_layers(objective.layers, partitions)
    low, best = 0.0, _probe(objective, partitions, inf)
    if best.ends is None:
        return None
    # Both bounds are costs of real partitions after each probe, so this ends at the exact optimum, not within a
    # tolerance.
    while low < best.value:
        middle = (low + best.value) / 2
        # Between adjacent floats the middle is rounded to one of them; only the lower one gives new information.
        probe = _probe(objective, partitions, middle if middle < best.value else low)
        if probe.ends is None:
            low = probe.value
        else:
            best = probe
    assert best.ends is not None
    return Solution([end - begin for begin, end in pairwise([0, *best.ends])], best.value)


def _probe(objective: Objective, partitions: int, limit: float) -> _Probe:
    """Extend each partition as far as it gets from every layer where it can begin; later ones need a layer each."""
    origins: list[dict[int, int]] = []  # for each partition where it may end, and where it then began
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
                # A cost within the limit is forbidden for another reason, which no limit changes.
                smallest_overflow = min(smallest_overflow, overflow if overflow > limit else inf)
            # Begins ascend, so the ends that an earlier one reached are known already.
            new = range(max(begin, beyond) + 1, end + 1)
            # If a partition does best to begin late, only the furthest end matters, and the probe is greedy: one
            # bisection for each partition. Otherwise every reachable end counts, with up to one bisection for each
            # layer and partition.
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


def best_nearby(
    start: Balance, allowed: Callable[[Balance], bool], price: Callable[[Balance], float], budget: int
) -> Balance:
    """Among the balances around `start` that are allowed, the cheapest by a price that takes long to compute.

    Walks from the cheapest balance known to those that differ by one layer, and prices at most `budget` of them, the
    most promising first. Of equals it returns the one priced first.
    """
    prices = {start: price(start)}
    waiting = [(prices[start], 0, start)]
    while waiting:
        for balance in neighbours(heappop(waiting)[-1]):
            if balance in prices or not allowed(balance):
                continue
            if len(prices) >= budget:
                return min(prices, key=prices.__getitem__)
            prices[balance] = price(balance)
            heappush(waiting, (prices[balance], len(prices), balance))
    return min(prices, key=prices.__getitem__)


def neighbours(balance: Balance) -> Iterator[Balance]:
    """One layer moves to the next partition or back; none is left empty."""
    for index in range(len(balance) - 1):
        before, left, right, after = balance[:index], balance[index], balance[index + 1], balance[index + 2 :]
        if left > 1:
            yield (*before, left - 1, right + 1, *after)
        if right > 1:
            yield (*before, left + 1, right - 1, *after)
