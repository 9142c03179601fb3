from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.report.page.curves import MOST_POINTS, thinned


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5000))
def test_a_long_curve_keeps_its_spikes_and_its_ends(values: list[float]) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 2
    assert kept == sorted(set(kept)) and set(kept) <= set(points) and kept[-1] == points[-1]
    assert {min(values), max(values)} <= {value for _, value in kept}


def test_a_short_curve_stays_as_it_is() -> None:
    points = [(1.0, 5.0), (2.0, 5.0), (3.0, 4.0)]
    assert thinned(points) == points
