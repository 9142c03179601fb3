"""Seeds are the same in every process and differ with every part."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_cli.data.seeds import derived_seed

parts = st.lists(st.integers() | st.text(max_size=5), max_size=4)


def test_a_seed_is_the_same_in_every_process_and_version() -> None:
    assert derived_seed(0, "order", 1) == 7021862330116196507


@settings(max_examples=50)
@given(one=parts, other=parts)
def test_different_parts_give_different_seeds_that_torch_accepts(
    one: list[int | str], other: list[int | str]
) -> None:
    assert (derived_seed(*one) == derived_seed(*other)) == (one == other)
    assert 0 <= derived_seed(*one) < 2**63
