"""Among balances that are almost equally good by one measure, the best by another that is dear to ask.

The candidates are many, so they are not listed but walked: from the best one known to those that have one border one
layer further. With a large enough budget that is all of them that can be reached so; with a smaller one the most
promising. Pure Python; knows nothing of what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

Balance = tuple[int, ...]


def best_nearby(
    start: Balance, allowed: Callable[[Balance], bool], price: Callable[[Balance], float], budget: int
) -> Balance:
    """The cheapest of the balances priced, `budget` at most; of equals the one found first, `start` before all."""
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
    """One layer from a partition to the next or back; none is left empty."""
    for index in range(len(balance) - 1):
        before, left, right, after = balance[:index], balance[index], balance[index + 1], balance[index + 2 :]
        if left > 1:
            yield (*before, left - 1, right + 1, *after)
        if right > 1:
            yield (*before, left + 1, right - 1, *after)
