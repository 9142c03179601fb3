"""Cuts are legal, cheap, and enough."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.by_tracing.borders import Border
from gpipe_cli.sequential.by_tracing.cuts import choose_cuts


def border(
    place: int, holders: int, *, tensors: int = 1, bytes: int = 8, obstacle: str | None = None
) -> Border:
    return Border((place,), obstacle, tensors, bytes, holders)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Border], int]:
    holds = draw(st.lists(st.booleans(), min_size=1, max_size=120))
    borders = [
        border(
            place,
            sum(holds[:place]),
            tensors=draw(st.integers(1, 3)),
            bytes=draw(st.integers(1, 50)),
            obstacle=draw(st.sampled_from([None, None, None, "it is barred"])),
        )
        for place in range(1, len(holds))
    ]
    return borders, sum(holds)


@given(models())
def test_every_layer_holds_something_and_no_cut_is_barred(model: tuple[list[Border], int]) -> None:
    borders, holders = model
    try:
        cuts = choose_cuts(borders, holders)
    except ConfigError:
        assert all(one.obstacle for one in borders if 0 < one.holders < holders)
        return
    assert cuts == sorted(cuts, key=lambda cut: cut.places)
    counts = [0, *(cut.holders for cut in cuts), holders]
    assert all(before < after for before, after in pairwise(counts)) or not cuts
    assert all(cut.obstacle is None for cut in cuts)


def test_between_two_modules_the_cheapest_border_is_cut_and_of_equals_the_last() -> None:
    borders = [border(1, 1), border(2, 1, bytes=4), border(3, 1, bytes=4), border(4, 2)]
    assert [cut.places for cut in choose_cuts(borders, 3)] == [(3,), (4,)]


def test_a_stretch_that_more_tensors_cross_is_cut_again_only_if_it_is_long() -> None:
    blocks = [border(place, place, tensors=1 if place % 10 == 0 else 2) for place in range(1, 200)]
    assert [cut.holders for cut in choose_cuts(blocks, 200)] == list(range(10, 200, 10))
    barely = [border(place, place, tensors=2 if 1 < place < 24 else 1) for place in range(1, 100)]
    assert [cut.holders for cut in choose_cuts(barely, 100)][:2] == [1, 24]
    growing = [border(place, place, tensors=1 + min(place, 100 - place) // 10) for place in range(1, 100)]
    cuts = [cut.holders for cut in choose_cuts(growing, 100)]
    assert max(after - before for before, after in pairwise([0, *cuts, 100])) <= 24


def test_a_small_model_in_which_several_tensors_always_cross_is_cut_too() -> None:
    assert len(choose_cuts([border(1, 1, tensors=2), border(2, 2, tensors=2)], 3)) == 2


def test_a_model_without_any_legal_cut_says_what_bars_them() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be cut anywhere: a dict crosses \('x'\); hand over nothing but"
    ):
        choose_cuts([border(1, 1, obstacle="a dict crosses ('x')")], 2)
