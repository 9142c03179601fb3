from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.balance.nearby import Balance, best_nearby


@given(st.data())
def test_with_budget_enough_no_balance_is_cheaper(data: st.DataObject) -> None:
    layers, partitions = data.draw(st.integers(3, 9)), data.draw(st.integers(2, 3))
    every = [one for one in product(range(1, layers), repeat=partitions) if sum(one) == layers]
    prices = {one: data.draw(st.integers(0, 99)) for one in every}
    start = data.draw(st.sampled_from(every))
    found = best_nearby(start, lambda _: True, prices.__getitem__, budget=1000)
    assert prices[found] == min(prices.values())


def test_neither_forbidden_balances_nor_the_budget_are_passed() -> None:
    asked: list[Balance] = []

    def price(balance: Balance) -> float:
        asked.append(balance)
        return -balance[0]

    found = best_nearby((5, 5), lambda balance: balance[0] <= 8, price, budget=100)
    assert found == (8, 2)
    assert max(balance[0] for balance in asked) == 8
    asked.clear()
    assert best_nearby((5, 5), lambda _: True, price, budget=3) == (6, 4)
    assert len(asked) == 3
    assert best_nearby((5, 5), lambda _: True, price, budget=1) == (5, 5)


def test_of_equals_the_start_is_kept() -> None:
    assert best_nearby((2, 2, 2), lambda _: True, lambda _: 1.0, budget=50) == (2, 2, 2)
