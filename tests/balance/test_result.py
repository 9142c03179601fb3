from __future__ import annotations

from gpipe_cli.balance.result import Balanced


def test_figures_of_a_balance_are_of_its_partitions() -> None:
    balanced = Balanced.of([1, 3], [4.0, 1.0, 1.0, 2.0], "ms")
    assert balanced.sums == [4.0, 4.0]
    assert (balanced.largest, balanced.lower_bound, balanced.imbalance) == (4.0, 4.0, 1.0)
    assert Balanced.of([3, 1], [4.0, 1.0, 1.0, 2.0], "ms").lower_bound == 4.0
