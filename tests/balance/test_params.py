from __future__ import annotations

from torch import nn

from gpipe_cli.balance.params import balance as by_params


def test_params_makes_the_largest_partition_as_small_as_possible() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)), nn.Linear(4, 12, bias=False))
    balanced = by_params(module, 2)
    assert balanced.layers == [3, 1]
    assert balanced.sums == [48, 48]
    assert balanced.imbalance == 1
