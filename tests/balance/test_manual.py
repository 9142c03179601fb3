from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.balance.manual import balance
from gpipe_cli.errors import ConfigError


@given(st.lists(st.integers(1, 20), min_size=1))
def test_a_balance_that_covers_the_model_is_taken_as_it_is(layers: list[int]) -> None:
    assert balance(sum(layers), layers).layers == layers


def test_one_that_does_not_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"balance.layers=\[4, 4\]: covers 8 layers, the model has 10"):
        balance(10, [4, 4])
