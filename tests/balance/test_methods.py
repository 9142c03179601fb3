"""The methods that measure nothing: manual, uniform and params, and the result that every method returns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_cli.balance import manual, params, uniform
from gpipe_cli.balance.result import BalanceResult
from gpipe_cli.errors import ConfigError


@given(st.lists(st.integers(1, 20), min_size=1))
def test_a_manual_balance_that_covers_the_model_is_used_unchanged(layers: list[int]) -> None:
    assert manual.balance(sum(layers), layers).layers == layers


def test_a_manual_balance_that_does_not_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"balance.layers=\[4, 4\]: covers 8 layers, the model has 10"):
        manual.balance(10, [4, 4])


@given(st.integers(1, 200), st.data())
def test_uniform_spreads_layers_as_evenly_as_possible(layers: int, data: st.DataObject) -> None:
    partitions = data.draw(st.integers(1, layers))
    balance = uniform.balance(layers, partitions).layers
    assert len(balance) == partitions and sum(balance) == layers
    assert max(balance) - min(balance) <= 1 and min(balance) >= 1


def test_uniform_gives_the_remainder_to_the_first_partitions() -> None:
    assert uniform.balance(11, 4).layers == [3, 3, 3, 2]


def test_params_makes_the_largest_partition_as_small_as_possible() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)), nn.Linear(4, 12, bias=False))
    result = params.balance(module, 2)
    assert result.layers == [3, 1]
    assert result.sums == [48, 48]
    assert result.imbalance == 1


def test_the_figures_of_a_result_are_those_of_its_partitions() -> None:
    result = BalanceResult.of([1, 3], [4.0, 1.0, 1.0, 2.0], "ms")
    assert result.sums == [4.0, 4.0]
    assert (result.largest, result.lower_bound, result.imbalance) == (4.0, 4.0, 1.0)
    assert BalanceResult.of([3, 1], [4.0, 1.0, 1.0, 2.0], "ms").lower_bound == 4.0
