from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.report.page.scale import Scale

numbers = st.floats(-1e100, 1e100)


@given(st.lists(numbers, min_size=1), st.sampled_from([0.0, 0.06]))
def test_every_value_has_a_place_and_marks_lie_on_the_axis(values: list[float], margin: float) -> None:
    scale = Scale.over(values, margin=margin)
    assert all(-1e-9 <= scale.share(value) <= 1 + 1e-9 for value in values)
    marks = scale.marks()
    assert marks == sorted(marks) and 1 <= len(marks) <= 12
    assert all(-1e-6 <= scale.share(mark) <= 1 + 1e-6 for mark in marks)


def test_marks_are_round() -> None:
    assert Scale(0, 1).marks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert Scale(0, 2437.5).marks() == [0, 500, 1000, 1500, 2000]
