from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.balance.uniform import balance
from gpipe_cli.errors import ConfigError


@given(st.integers(1, 200), st.data())
def test_layers_are_spread_as_evenly_as_can_be(layers: int, data: st.DataObject) -> None:
    partitions = data.draw(st.integers(1, layers))
    found = balance(layers, partitions)
    assert len(found) == partitions and sum(found) == layers
    assert max(found) - min(found) <= 1 and min(found) >= 1


def test_the_remainder_goes_to_the_first() -> None:
    assert balance(11, 4) == [3, 3, 3, 2]


def test_more_partitions_than_layers_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="partitions=4: the model has only 3 layers; give at most that many"
    ):
        balance(3, 4)
