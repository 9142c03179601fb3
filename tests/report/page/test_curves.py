from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.report.page.curves import MAX_CURVES, MAX_POINTS, CurvePoint, read_curves


def row(step: int, loss: float, **more: float) -> dict[str, Any]:
    return {"step": step, "split": "train", "loss": loss, **more}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5000))
def test_a_long_curve_keeps_its_extremes_and_its_ends(values: list[float]) -> None:
    (curve,) = read_curves(row(step, value) for step, value in enumerate(values))
    points = curve.points
    assert len(points) <= MAX_POINTS and list(points) == sorted(points)
    assert (points[0].first, points[-1].last) == (0, len(values) - 1)
    assert (min(point.low for point in points), max(point.high for point in points)) == (
        min(values),
        max(values),
    )
    assert all(before.last < after.first for before, after in pairwise(points))
    assert curve.best == (values.index(min(values)), min(values))


def test_the_points_of_a_long_curve_are_means() -> None:
    (curve,) = read_curves(row(step, float(step % 2)) for step in range(4 * MAX_POINTS))
    assert {(point.mean, point.low, point.high) for point in curve.points} == {(0.5, 0.0, 1.0)}


def test_a_row_contains_the_losses_since_the_row_before() -> None:
    (curve,) = read_curves([row(1, 5.0), row(10, 3.0, loss_mean=4.0, loss_min=2.0, loss_max=4.5)])
    assert curve.points == (CurvePoint(1, 1, 5.0, 5.0, 5.0), CurvePoint(10, 10, 4.0, 2.0, 4.5))


@pytest.mark.parametrize("damaged", [{}, {"loss_min": "x"}, {"loss_min": 9.0}, {"loss_mean": float("nan")}])
def test_a_window_that_cannot_be_is_ignored(damaged: dict[str, Any]) -> None:
    window = {} if not damaged else {"loss_mean": 4.0, "loss_min": 2.0, "loss_max": 4.5, **damaged}
    (curve,) = read_curves([row(10, 3.0, **window)])
    assert curve.points == (CurvePoint(10, 10, 3.0, 3.0, 3.0),)


def test_a_file_of_many_names_has_few_curves() -> None:
    assert len(read_curves([row(1, 1.0, **{f"metric {index}": 1.0 for index in range(10**4)})])) == MAX_CURVES
