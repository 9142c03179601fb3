from __future__ import annotations

from functools import cache
from itertools import product
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.balance.solver import Balance, best_nearby, solve


def by_dynamic_programming(costs: list[int], partitions: int) -> int:
    """The smallest possible largest sum, tried out in full."""
    prefix = [0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    @cache
    def best(end: int, parts: int) -> float:
        if parts == 1:
            return prefix[end]
        return min(
            (max(best(cut, parts - 1), prefix[end] - prefix[cut]) for cut in range(parts - 1, end)),
            default=inf,
        )

    return int(best(len(costs), partitions))


@given(st.data())
def test_no_balance_is_better(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=16))
    nothing_is_better(costs, data.draw(st.integers(1, len(costs))))


def test_no_balance_of_a_thousand_is_better() -> None:
    """Drawn without looking for awkward ones, which takes a tenth of the time."""
    chance = Random(0)
    for _ in range(1000):
        costs = [chance.randint(0, 1000) for _ in range(chance.randint(1, 16))]
        nothing_is_better(costs, chance.randint(1, len(costs)))


def nothing_is_better(costs: list[int], partitions: int) -> None:
    solution = solve(costs, partitions)
    assert len(solution.balance) == partitions
    assert sum(solution.balance) == len(costs)
    assert min(solution.balance) >= 1
    begin, sums = 0, []
    for length in solution.balance:
        sums.append(sum(costs[begin : begin + length]))
        begin += length
    assert max(sums) == solution.largest == by_dynamic_programming(costs, partitions)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 8))
def test_fractions_are_balanced_too(costs: list[float], partitions: int) -> None:
    if partitions > len(costs):
        return
    solution = solve(costs, partitions)
    assert min(solution.balance) >= 1 and sum(solution.balance) == len(costs)
    assert solution.largest >= max(costs) * (1 - 1e-12)


@pytest.mark.parametrize("cost", [0.1, 1 / 3, 1e-300, 1e300])
def test_equal_fractions_end_though_their_sums_are_rounded(cost: float) -> None:
    """Bounds that are neighbouring numbers have no middle: bisecting them went on for ever."""
    for layers in range(1, 40):
        for partitions in range(1, layers + 1):
            balance = solve([cost] * layers, partitions).balance
            assert max(balance) == -(-layers // partitions)


def test_the_cases_torchgpipe_got_wrong() -> None:
    """Its solver took the smallest cost away first: equal layers became [1, 1, 1, 4], others an empty part."""
    assert sorted(solve([1] * 7, 4).balance) == [1, 2, 2, 2]
    assert 0 not in solve([100, 101, 100, 101, 100, 101, 100], 4).balance


def test_ten_thousand_layers_take_few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpipe_cli.balance import solver

    probes = []
    real = solver._probe
    monkeypatch.setattr(solver, "_probe", lambda *words: probes.append(1) or real(*words))
    costs = [(index * 7919) % 1009 + 1 for index in range(10_000)]
    assert len(solve(costs, 64).balance) == 64
    assert len(probes) < 40


@pytest.mark.parametrize(
    ("costs", "partitions", "says"),
    [
        ([1, 2], 3, r"fewer layers than partitions \(layers: 2, partitions: 3\)"),
        ([1], 0, r"positive integer \(partitions: 0\)"),
        ([1, -1], 1, "finite and not negative"),
        ([1, float("nan")], 1, "finite and not negative"),
        ([1, inf], 1, "finite and not negative"),
    ],
)
def test_impossible_wishes_are_refused(costs: list[float], partitions: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        solve(costs, partitions)


@given(st.data())
def test_with_enough_budget_no_balance_nearby_is_cheaper(data: st.DataObject) -> None:
    layers, partitions = data.draw(st.integers(3, 9)), data.draw(st.integers(2, 3))
    every = [sizes for sizes in product(range(1, layers), repeat=partitions) if sum(sizes) == layers]
    prices = {balance: data.draw(st.integers(0, 99)) for balance in every}
    start = data.draw(st.sampled_from(every))
    best = best_nearby(start, lambda _: True, prices.__getitem__, budget=1000)
    assert prices[best] == min(prices.values())


def test_best_nearby_respects_what_is_allowed_and_the_budget() -> None:
    priced: list[Balance] = []

    def price(balance: Balance) -> float:
        priced.append(balance)
        return -balance[0]

    best = best_nearby((5, 5), lambda balance: balance[0] <= 8, price, budget=100)
    assert best == (8, 2)
    assert max(balance[0] for balance in priced) == 8
    priced.clear()
    assert best_nearby((5, 5), lambda _: True, price, budget=3) == (6, 4)
    assert len(priced) == 3
    assert best_nearby((5, 5), lambda _: True, price, budget=1) == (5, 5)


def test_of_equally_good_balances_the_start_wins() -> None:
    assert best_nearby((2, 2, 2), lambda _: True, lambda _: 1.0, budget=50) == (2, 2, 2)
