from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.balance.uniform import balance


@given(st.integers(1, 200), st.data())
def test_layers_are_spread_as_evenly_as_can_be(layers: int, data: st.DataObject) -> None:
    partitions = data.draw(st.integers(1, layers))
    found = balance(layers, partitions).layers
    assert len(found) == partitions and sum(found) == layers
    assert max(found) - min(found) <= 1 and min(found) >= 1


def test_the_remainder_goes_to_the_first() -> None:
    assert balance(11, 4).layers == [3, 3, 3, 2]
